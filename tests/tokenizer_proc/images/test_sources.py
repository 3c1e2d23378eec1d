"""Images are read out of messages; what is no image, or too large a one, is refused by its part."""

import struct
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest
from image_parts import data_url, encoded, image_part, message, video_part
from PIL import Image

from headrace.errors import InvalidValue, RequestError, Unsupported
from headrace.tokenizer_proc.images import sources as sources_module
from headrace.tokenizer_proc.images.header import Header
from headrace.tokenizer_proc.images.sources import MAX_PIXELS, ImageSource, sources_of
from headrace.tokenizer_proc.requests.openai import ContentPart, RequestMessage

WHERE = "messages[0].content[1].image_url"
PICTURE = Image.new("RGB", (7, 5), 99)
PNG = encoded(PICTURE)


def sources(*messages: dict[str, Any], max_images: int = 4) -> list[ImageSource]:
    return sources_of(msgspec.convert(list(messages), list[RequestMessage]), max_images)


def refusal(url: str, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        sources(message("look", image_part(url, **fields)))
    assert str(refused.value).startswith(f"{refused.value.param}: ")
    return refused.value


def png_of(width: int, height: int) -> bytes:
    """Return the beginning of a PNG of any size, which has no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + header


def test_images_are_those_of_all_messages_in_order() -> None:
    jpeg = encoded(PICTURE, "JPEG")
    found = sources(
        {"role": "system", "content": "text"},
        message("a", image_part(data_url(PNG)), "b", image_part(data_url(jpeg, "image/jpg"))),
        message(image_part(data_url(PNG), detail="low")),
    )
    assert found == [
        ImageSource(PNG, Header("PNG", 7, 5), "messages[1].content[1].image_url"),
        ImageSource(jpeg, Header("JPEG", 7, 5), "messages[1].content[3].image_url"),
        ImageSource(PNG, Header("PNG", 7, 5), "messages[2].content[0].image_url", is_low=True),
    ]


def test_there_are_no_more_than_may_be() -> None:
    part = image_part(data_url(PNG))
    assert len(sources(message(part, part), message(part), max_images=3)) == 3
    with pytest.raises(InvalidValue, match=r"3 images are more than the 2 .*--max-images") as no:
        sources(message(part, part), message(part), max_images=2)
    assert no.value.param == "messages"


def test_frames_of_a_video_are_images_where_a_model_takes_them() -> None:
    frames = video_part(PICTURE, PICTURE)
    chat = [message("a", image_part(data_url(PNG)), frames), message(frames)]
    messages = msgspec.convert(chat, list[RequestMessage])
    text = "<{0.times}>".format
    found = sources_of(messages, 5, video_text=text)
    where = ["messages[0].content[2].video_url", "messages[1].content[0].video_url"]
    assert [one.where for one in found[1:]] == [f"{w}[{k}]" for w in where for k in (0, 1)]
    assert [isinstance(one, ImageSource) and one.is_low for one in found] == [False, *[True] * 4]
    assert messages[1].content == [ContentPart("text", "<[0.0, 1.0]>")]
    messages = msgspec.convert(chat, list[RequestMessage])
    with pytest.raises(InvalidValue, match=r"5 images are more than the 4 .* a frame is one"):
        sources_of(messages, 4, video_text=text)
    with pytest.raises(Unsupported, match=r"video_url: this model takes images, and no videos"):
        sources_of(msgspec.convert(chat, list[RequestMessage]), 5)


def test_too_many_frames_are_refused_before_they_are_read() -> None:
    part = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64" + "," * 10**6}}
    messages = msgspec.convert([message(part)], list[RequestMessage])
    tracemalloc.start()
    try:
        with pytest.raises(InvalidValue, match="1000000 images are more than the 4 "):
            sources_of(messages, 4, video_text="{0.times}".format)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("", "must be a URL like data:image/png;base64,..."),
        ("data:image/png;base64", "must be a URL like data:image/png;base64,..."),
        ("data:image/png,abc", "must be a URL like data:image/png;base64,..."),
        ("file:///etc/passwd", "must be a URL like data:image/png;base64,..."),
        ("data:image/png;base64,%%%%", "is not base64, "),
        (data_url(PNG)[:-1], "is not base64, "),
        (data_url(PNG) + " ", "is not base64, "),
        (data_url(b""), "its format is none that is known; send PNG, JPEG, WebP or GIF"),
        (data_url(b"garbage" * 9), "its format is none that is known; send PNG"),
        (data_url(b"<svg/>", "image/svg+xml"), "its format is SVG; send PNG"),
        (data_url(encoded(PICTURE, "TIFF"), "image/tiff"), "its format is TIFF; send PNG"),
        (data_url(PNG, "image/jpeg"), "says that it is image/jpeg, and is PNG"),
        (data_url(PNG, "text/plain"), "says that it is text/plain, and is PNG"),
        (data_url(PNG, ""), "says that it is nothing, and is PNG"),
        (data_url(PNG[:20]), "ends before the header with its size"),
        (data_url(png_of(30_000, 30_000)), "30000 x 30000 pixels are more than the 50000000"),
        (data_url(png_of(1, 100_000)), "1 x 100000 pixels: a side may be 200 times the other"),
        (data_url(png_of(0, 9)), "0 x 9 pixels are no image"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_its_part(url: str, what: str) -> None:
    refused = refusal(url)
    assert isinstance(refused, InvalidValue)
    assert refused.param == WHERE
    assert what in str(refused)


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "https://localhost/x.png", "HTTP://example.com/a"]
)
def test_nothing_is_fetched(url: str) -> None:
    refused = refusal(url)
    assert isinstance(refused, Unsupported)
    assert "fetches nothing (--allowed-media-domains); send a data: URL" in str(refused)


def test_a_detail_is_one_that_is_known() -> None:
    refused = refusal(data_url(PNG), detail="blurred")
    assert refused.param == f"{WHERE}.detail"
    assert "must be one of auto, low, high, not 'blurred'" in str(refused)


def test_a_part_without_its_object_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"image_url: must be there, as an object with 'url'"):
        sources(message({"type": "image_url"}))


def test_the_largest_size_is_taken() -> None:
    part = image_part(data_url(png_of(MAX_PIXELS // 5000, 5000)))
    assert sources(message(part))[0].header.width == MAX_PIXELS // 5000


def test_a_jpeg_has_as_many_scans_as_can_be_decoded() -> None:
    jpeg = encoded(Image.new("L", (4000, 4000)), "JPEG", progressive=True)
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    num_more = 62 - jpeg.count(b"\xff\xda")
    sources(message(image_part(data_url(jpeg + scan * num_more, "image/jpeg"))))
    refused = refusal(data_url(jpeg + scan * (num_more + 1), "image/jpeg"))
    assert refused.param == WHERE
    assert "4000 x 4000 pixels in 63 scans are more than 1000000000 altogether" in str(refused)


def test_too_many_bytes_are_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "MAX_IMAGE_BYTES", 30)
    assert "bytes are more than the 30 of an image" in str(refusal(data_url(PNG)))
    assert "bytes are more than the 30 of an image" in str(
        refusal(data_url(b"")[:-1] + "," + "%" * 50)
    )
