"""An image file has its format and size in its first bytes; other data are rejected."""

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headrace.tokenizer_proc.images.header import FORMATS, MIN_BYTES, Header, read_header

SIZE = (301, 177)


def encoded(format: str, mode: str = "RGB", **options: Any) -> bytes:
    data = io.BytesIO()
    Image.new(mode, SIZE, 77).save(data, format, **options)
    return data.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        encoded("PNG"),
        encoded("PNG", "RGBA"),
        encoded("JPEG"),
        encoded("JPEG", progressive=True, comment=b"x" * 60_000, dpi=(7, 7)),
        encoded("JPEG", "L"),
        encoded("GIF", "P"),
        encoded("WEBP"),
        encoded("WEBP", lossless=True),
        encoded("WEBP", "RGBA", exif=Image.Exif()),
        encoded("WEBP", save_all=True, append_images=[Image.new("RGB", SIZE, 5)]),
    ],
)
def test_a_header_says_what_pillow_finds(data: bytes) -> None:
    with Image.open(io.BytesIO(data)) as image:
        assert image.format is not None
        assert read_header(data) == Header(image.format, *SIZE)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<!-- x --><svg/>", "SVG"),
        (b"<!doctype html><html>", "text with tags"),
        (encoded("BMP"), "BMP"),
        (encoded("TIFF"), "TIFF"),
        (b"%PDF-1.7", "PDF"),
        (b"\0\0\0\x20ftypavif", "AVIF, HEIC or a video"),
        (b"RIFF\0\0\0\0WAVE", "none that is known"),
        (b"", "none that is known"),
    ],
)
def test_another_format_is_called_by_its_name(data: bytes, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}$"):
        read_header(data)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_cut_off_before_its_size_has_none(format: str) -> None:
    data = encoded(format)
    with Image.open(io.BytesIO(data)):
        pass
    assert read_header(data[: MIN_BYTES - 1]) is None
    assert read_header(data) == Header(format, *SIZE)


def test_sizes_are_as_large_as_they_are_said_to_be() -> None:
    png = bytearray(encoded("PNG"))
    png[16:24] = (30_000).to_bytes(4, "big") + (2**31 - 1).to_bytes(4, "big")
    assert read_header(bytes(png)) == Header("PNG", 30_000, 2**31 - 1)


def test_a_jpeg_without_a_frame_has_no_size() -> None:
    assert read_header(b"\xff\xd8\xff\xd9" + bytes(40)) is None
    assert read_header(b"\xff\xd8\xff\xe0" + b"\0\0" * 40) is None


def test_a_frame_is_not_looked_for_forever() -> None:
    assert read_header(b"\xff\xd8" + b"\xff\xd0" * 3000 + encoded("JPEG")[2:]) is None
    assert read_header(b"\xff\xd8" + b"\xff\xd0" * 300 + encoded("JPEG")[2:]) is not None


BEGINNINGS = st.sampled_from(
    [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF    WEBPVP8X", b"RIFF    WEBPVP8L"]
)


@given(st.builds(bytes.__add__, BEGINNINGS, st.binary(max_size=200)))
def test_nothing_that_is_said_is_too_odd(data: bytes) -> None:
    header = read_header(data)
    assert header is None or (header.format in FORMATS and min(header[1:]) >= 0)
