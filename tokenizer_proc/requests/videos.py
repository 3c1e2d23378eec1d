"""Videos of a chat: frames that a client has taken out of one, in the form of vLLM. Pure.

A frame is an image. Its time is that of `media_io_kwargs`, which is for all videos of a request:
https://docs.vllm.ai/en/latest/features/multimodal_inputs.html
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import msgspec

from headrace.errors import InvalidValue, Unsupported

HEAD = "data:video/jpeg;base64"
FRAME_HEAD = "data:image/jpeg;base64,"
FIELD = "media_io_kwargs.video"
MAX_SECONDS = 360_000.0  # a hundred hours
MAX_FRAME = 1 << 31  # of a video's frames


class VideoUrl(msgspec.Struct):
    """`video_url` of a chat's part."""

    url: str


class VideoOptions(msgspec.Struct):
    """When the frames of a video were.

    Other options of vLLM say how it takes frames out of a file; they change nothing here.
    """

    fps: float = 1.0
    frames_indices: list[int] | None = None  # of the frames sent among those there were; all
    total_num_frames: int | None = None
    duration: float | None = None  # in seconds


class MediaOptions(msgspec.Struct):
    """`media_io_kwargs` of a request."""

    video: VideoOptions | None = None


@dataclass(frozen=True)
class Video:
    """The frames of a video, as URLs of images, and when they were, in seconds."""

    frames: list[str]
    times: list[float]
    duration: float


def num_frames_in(video: VideoUrl | None) -> int:
    """Return how many frames a video has, before any is read."""
    return 0 if video is None else video.url.count(",")


def read_video(video: VideoUrl | None, options: VideoOptions, where: str) -> Video:
    """Return the frames of a video, undecoded.

    Args:
        where: the field that it came in.

    Raises:
        InvalidValue: there is no URL, or the options do not go with its frames.
        Unsupported: it is a file that has yet to be made into frames.
    """
    if video is None:
        raise InvalidValue(f"{where}: must be there, as an object with 'url'", where)
    head, comma, data = video.url.partition(",")
    if head.lower() != HEAD or not comma:
        raise Unsupported(
            f"{where}: must have its frames, as {HEAD},FRAME,FRAME; no video is decoded here", where
        )
    frames = [FRAME_HEAD + frame for frame in data.split(",")]
    return timed(frames, options)


def timed(frames: Sequence[str], options: VideoOptions) -> Video:
    """Return frames with their times."""
    num_frames = len(frames)
    places = options.frames_indices
    total = num_frames if options.total_num_frames is None else options.total_num_frames
    if not (isfinite(options.fps) and options.fps > 0):
        refuse_option("fps", f"must be above 0, not {options.fps}")
    if places is None:
        places = [*range(num_frames)]
    if len(places) != num_frames or min(places) < 0 or max(places) > MAX_FRAME:
        what = f"must be {num_frames} numbers of frames, from 0 to {MAX_FRAME}"
        refuse_option("frames_indices", what)
    if not num_frames <= total <= MAX_FRAME:
        refuse_option("total_num_frames", f"must be between {num_frames} and {MAX_FRAME}")
    times = [place / options.fps for place in places]
    duration = total / options.fps if options.duration is None else options.duration
    if not 0 <= max(duration, *times) < MAX_SECONDS or duration < 0:
        refuse_option("duration", f"must be below {MAX_SECONDS:.0f} s, as the times of all frames")
    return Video([*frames], times, duration)


def refuse_option(name: str, what: str) -> None:
    """Raise what is wrong with an option."""
    raise InvalidValue(f"{FIELD}.{name}: {what}", f"{FIELD}.{name}")
