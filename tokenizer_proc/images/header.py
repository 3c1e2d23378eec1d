"""Image headers: format and size, read before any pixel is decoded. Pure.

PNG: https://www.w3.org/TR/png-3/#11IHDR. JPEG: ITU-T T.81, B.2.2. WebP: RFC 9649. GIF: GIF89a, 18.
"""

import struct
from typing import NamedTuple

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # as Pillow calls them
MIN_BYTES = 30  # that tell the size of all but JPEGs
# JPEG's start of a frame, of any kind: C4, C8 and CC are other segments.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
SCAN = b"\xff\xda"  # begins each; within one, FF is followed by other bytes
MAX_SEGMENTS = 2000  # of 64 KB at most, before the first frame
ALONE = frozenset(range(0xD0, 0xD9)) | {0x01}  # JPEG's markers without a length


class Header(NamedTuple):
    """A format, and pixels as they are stored, before any rotation."""

    format: str
    width: int
    height: int


def read_header(data: bytes) -> Header | None:
    """Return an image's header; None if it is truncated.

    Raises:
        ValueError: it is no image of a format that is taken; the text says what it is.
    """
    found = format_of(data)
    if found not in FORMATS:
        raise ValueError(found)
    size = jpeg_size(data) if found == "JPEG" else None
    if found != "JPEG" and len(data) >= MIN_BYTES:
        size = SIZES[found](data)
    return size and Header(found, *size)


def format_of(data: bytes) -> str:
    """Return the format from the first bytes."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    for name, beginnings in OTHERS.items():
        if data.startswith(beginnings):
            return name
    if data[4:8] == b"ftyp":
        return "AVIF, HEIC or a video"
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith(b"<"):
        return "SVG" if b"<svg" in data[:4096] else "text with tags"
    return "none that is known"


# What people send that is not taken, by its first bytes.
OTHERS: dict[str, tuple[bytes, ...]] = {
    "BMP": (b"BM",),
    "TIFF": (b"II*\0", b"MM\0*"),
    "PDF": (b"%PDF",),
    "JPEG XL": (b"\xff\x0a", b"\0\0\0\x0cJXL "),
    "JPEG 2000": (b"\0\0\0\x0cjP  ",),
    "an icon": (b"\0\0\1\0",),
}


def png_size(data: bytes) -> tuple[int, int]:
    """Return width and height, of the chunk that is the first."""
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def gif_size(data: bytes) -> tuple[int, int]:
    """Return width and height of the screen."""
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height, from whichever chunk is first; None without them."""
    match data[12:16]:
        case b"VP8X":  # 24 bits each, less one
            width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        case b"VP8L":  # 14 bits each, less one, after a byte
            bits = int.from_bytes(data[21:25], "little")
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":  # 14 bits of 16 each, after a frame tag and three bytes
            width, height = (n & 0x3FFF for n in struct.unpack_from("<HH", data, 26))
        case _:
            return None
    return width, height


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height, of the first frame there is."""
    at = 2
    for _ in range(MAX_SEGMENTS):
        if at + 9 > len(data) or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # fill
            at += 1
        elif marker in FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        elif marker in ALONE:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


SIZES = {"PNG": png_size, "GIF": gif_size, "WEBP": webp_size}
