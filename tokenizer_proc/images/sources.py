"""Image sources of a conversation, and checks before a pixel is decoded. Pure.

Images come in `data:` URLs, as OpenAI's `image_url` parts of messages, or are elsewhere, for the
fetcher to get. The size that their headers tell bounds what decoding them takes.
"""

import binascii
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.config.config import MAX_IMAGE_BYTES
from headrace.errors import InvalidValue, Unsupported
from headrace.tokenizer_proc.images.header import SCAN, Header, read_header
from headrace.tokenizer_proc.requests.openai import (
    IMAGE_PART,
    VIDEO_PART,
    ContentPart,
    ImageUrl,
    RequestMessage,
)
from headrace.tokenizer_proc.requests.videos import Video, VideoOptions, num_frames_in, read_video

MAX_PIXELS = 50_000_000  # 150 MB as bytes; what phones make has 12 to 50 million
MAX_SCANNED = 1_000_000_000  # pixels of a JPEG's scans, each of which may be all; cameras make 10
MAX_RATIO = 200  # of an image's sides; some processors take no more
DETAILS = ("auto", "low", "high")
SCHEME_CHARACTERS = len("https:")
TAKEN = "send PNG, JPEG, WebP or GIF"


@dataclass(frozen=True)
class ImageSource:
    """An image that may be decoded."""

    data: bytes
    header: Header
    where: str  # the field that it came in
    is_low: bool = False  # few tokens are to be made of it


@dataclass(frozen=True)
class Remote:
    """An image that is to be fetched."""

    url: str
    where: str
    is_low: bool = False

    def source(self, mime_type: str, data: bytes) -> ImageSource:
        """Return the image as its server has sent it.

        Raises:
            InvalidValue: it is none, or too large.
        """
        return ImageSource(
            data, checked_header(data, mime_type, self.where), self.where, self.is_low
        )


def image_parts(messages: Sequence[RequestMessage]) -> Iterator[tuple[str, ContentPart]]:
    """Yield the parts of a conversation that are images or videos, by their fields' names."""
    for i, message in enumerate(messages):
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if part.type in (IMAGE_PART, VIDEO_PART):
                    yield f"messages[{i}].content[{j}].{part.type}", part


def sources_of(
    messages: Sequence[RequestMessage],
    max_images: int,
    fetches: bool = False,
    video_text: Callable[[Video], str] | None = None,
    video_options: VideoOptions | None = None,
) -> list[ImageSource | Remote]:
    """Return the images of a conversation, in order, and the frames of its videos.

    A video's part becomes a text, with a place for each frame.

    Args:
        fetches: whether this server fetches any.
        video_text: returns that text; None: the model takes no videos.

    Raises:
        RequestError: there are too many, or one is none, or too large; the text names its part.
    """
    given: list[tuple[ImageUrl | None, str]] = []
    for where, part in image_parts(messages):
        if part.type == IMAGE_PART:
            given.append((part.image_url, where))
            continue
        if video_text is None:
            raise Unsupported(f"{where}: this model takes images, and no videos", where)
        check_number(len(given) + num_frames_in(part.video_url), max_images)
        video = read_video(part.video_url, video_options or VideoOptions(), where)
        frames = (ImageUrl(url, "low") for url in video.frames)
        given += ((frame, f"{where}[{k}]") for k, frame in enumerate(frames))
        part.type, part.text, part.video_url = "text", video_text(video), None
    check_number(len(given), max_images)
    return [source_of(image, where, fetches) for image, where in given]


def check_number(num_images: int, max_images: int) -> None:
    """Refuse more images than a request may have."""
    if num_images > max_images:
        raise InvalidValue(
            f"messages: {num_images} images are more than the {max_images} that a request may have "
            "(--max-images); a frame is one",
            "messages",
        )


def source_of(image: ImageUrl | None, where: str, fetches: bool) -> ImageSource | Remote:
    """Return the image of one part."""
    if image is None:
        raise InvalidValue(f"{where}: must be there, as an object with 'url'", where)
    if image.detail not in DETAILS:
        raise InvalidValue(
            f"{where}.detail: must be one of {', '.join(DETAILS)}, not '{image.detail[:20]}'",
            f"{where}.detail",
        )
    is_low = image.detail == "low"
    if image.url[:SCHEME_CHARACTERS].lower().startswith(("http:", "https:")):
        if fetches:
            return Remote(image.url, where, is_low)
        raise Unsupported(
            f"{where}: this server fetches nothing (--allowed-media-domains); send a data: URL",
            where,
        )
    mime_type, data = read_url(image.url, where)
    return ImageSource(data, checked_header(data, mime_type, where), where, is_low)


def read_url(url: str, where: str) -> tuple[str, bytes]:
    """Return the MIME type that a URL claims, and its data."""
    head, comma, text = url.partition(",")
    claims = head.lower().split(";")
    if not claims[0].startswith("data:") or not comma or claims[-1] != "base64":
        raise InvalidValue(f"{where}: must be a URL like data:image/png;base64,...", where)
    if len(text) * 3 // 4 > MAX_IMAGE_BYTES:
        raise InvalidValue(
            f"{where}: {len(text) * 3 // 4} bytes are more than the {MAX_IMAGE_BYTES} of an image",
            where,
        )
    try:
        return claims[0].removeprefix("data:"), binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise InvalidValue(f"{where}: is not base64, padded by '='", where) from None


def checked_header(data: bytes, mime_type: str, where: str) -> Header:
    """Return an image's header, which matches its claimed type and the size limits."""
    try:
        header = read_header(data)
    except ValueError as error:
        raise InvalidValue(f"{where}: its format is {error}; {TAKEN}", where) from None
    if header is None:
        raise InvalidValue(f"{where}: ends before the header with its size", where)
    if mime_type.replace("image/jpg", "image/jpeg") != f"image/{header.format.lower()}":
        raise InvalidValue(
            f"{where}: says that it is {mime_type[:40] or 'nothing'}, and is {header.format}", where
        )
    width, height = header.width, header.height
    size = f"{where}: {width} x {height} pixels"
    if not (width and height):
        raise InvalidValue(f"{size} are no image", where)
    if width * height > MAX_PIXELS:
        raise InvalidValue(f"{size} are more than the {MAX_PIXELS} of an image", where)
    if header.format == "JPEG" and (scans := data.count(SCAN)) * width * height > MAX_SCANNED:
        raise InvalidValue(f"{size} in {scans} scans are more than {MAX_SCANNED} altogether", where)
    if max(width, height) > MAX_RATIO * min(width, height):
        raise InvalidValue(f"{size}: a side may be {MAX_RATIO} times the other, not more", where)
    return header
