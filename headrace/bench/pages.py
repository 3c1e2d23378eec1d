"""Synthetic documents: pages of text as a scanner has them, drawn at random."""

import io
from base64 import b64encode
from collections.abc import Iterable
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.workload import WORDS

if TYPE_CHECKING:
    from PIL import Image

A4 = 210 / 297  # width by height
HEIGHT = 11.7  # inches
LINES = 64
WORDS_PER_LINE = 12
GRAIN = 6.0  # standard deviation of a scanner's noise, of 255
QUALITY = 90
MIN_DPI = 20
NUM_PAGES = 8  # of one size: they take a second each to draw
OWN_BYTES = 12  # a multiple of 3: what follows in base64 is as if it began there


def draw_page(dpi: int, random: np.random.Generator) -> "Image.Image":
    """Return an A4 page of random words, with a scanner's grain."""
    from PIL import Image, ImageDraw, ImageFont

    height = round(HEIGHT * dpi)
    width = round(height * A4)
    page = Image.new("L", (width, height), 250)
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=height / LINES * 0.7)
    for line in range(3, LINES - 3):
        words = (WORDS[i] for i in random.integers(0, len(WORDS), WORDS_PER_LINE))
        pen.text((width // 12, line * height // LINES), " ".join(words), fill=20, font=font)
    grain = random.normal(0, GRAIN, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(page)[..., None] + grain, 0, 255).astype(np.uint8))


def page_file(dpi: int, random: np.random.Generator) -> bytes:
    """Return a page as a JPEG: 1.2 MB at 200 dots per inch, 2.5 MB at 300."""
    data = io.BytesIO()
    draw_page(dpi, random).save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


class Distinct:
    """Images of which no two are alike: some files in turn, each with other bytes at its end."""

    def __init__(self, files: Iterable[bytes], random: np.random.Generator) -> None:
        """`files` are JPEGs."""
        self._random = random
        self._pages = cycle([b64encode(file + bytes(-len(file) % 3)).decode() for file in files])

    def url(self) -> str:
        """Return an image as a URL."""
        own = b64encode(self._random.bytes(OWN_BYTES)).decode()
        return f"data:image/jpeg;base64,{next(self._pages)}{own}"


class Pages(Distinct):
    """Scanned pages."""

    def __init__(self, dpi: int, random: np.random.Generator) -> None:
        """Draw the pages."""
        super().__init__((page_file(dpi, random) for _ in range(NUM_PAGES)), random)
