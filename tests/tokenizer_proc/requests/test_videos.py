"""Videos come as frames, whose times are those that a client tells, or one a second."""

from typing import Any

import msgspec
import pytest

from headrace.errors import RequestError, Unsupported
from headrace.tokenizer_proc.requests.videos import Video, VideoOptions, VideoUrl, read_video

WHERE = "messages[0].content[0].video_url"
URL = "data:video/jpeg;base64,QQ==,Qg==,Qw=="
FRAMES = [f"data:image/jpeg;base64,{text}" for text in ("QQ==", "Qg==", "Qw==")]


def read(url: str = URL, **options: Any) -> Video:
    return read_video(VideoUrl(url), msgspec.convert(options, VideoOptions), WHERE)


@pytest.mark.parametrize(
    ("options", "times", "duration"),
    [
        ({}, [0, 1, 2], 3),
        ({"fps": 2.0}, [0, 0.5, 1], 1.5),
        ({"fps": 10.0, "frames_indices": [5, 25, 45], "total_num_frames": 60}, [0.5, 2.5, 4.5], 6),
        ({"duration": 7.5}, [0, 1, 2], 7.5),
        ({"num_frames": 32, "video_backend": "opencv"}, [0, 1, 2], 3),  # vLLM's
    ],
)
def test_frames_have_times(options: dict[str, Any], times: list[float], duration: float) -> None:
    assert read(**options) == Video(FRAMES, times, duration)


@pytest.mark.parametrize(
    "url", ["data:video/mp4;base64,QQ==", "https://a.b/c.mp4", "data:video/jpeg;base64", "x"]
)
def test_a_video_that_is_no_frames_is_refused(url: str) -> None:
    with pytest.raises(Unsupported, match="no video is decoded here") as refused:
        read(url)
    assert refused.value.param == WHERE


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fps": 0.0}, "fps: must be above 0, not 0.0"),
        ({"fps": float("inf")}, "fps: must be above 0"),
        ({"frames_indices": [0, 1]}, "frames_indices: must be 3 numbers of frames"),
        ({"frames_indices": [0, -1, 2]}, "frames_indices: must be 3 numbers of frames"),
        ({"frames_indices": [0, 1, 10**400]}, "frames_indices: must be 3 numbers of frames"),
        ({"total_num_frames": 2}, "total_num_frames: must be between 3 and 2147483648"),
        ({"total_num_frames": 10**400}, "total_num_frames: must be between 3 and"),
        ({"duration": -1.0}, "duration: must be below 360000 s"),
        ({"fps": 1e-9}, "duration: must be below 360000 s"),
    ],
)
def test_times_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(**options)
    assert str(refused.value).startswith(f"media_io_kwargs.video.{says}")


def test_a_video_needs_its_object() -> None:
    with pytest.raises(RequestError, match=r"video_url: must be there, as an object with 'url'"):
        read_video(None, VideoOptions(), WHERE)
