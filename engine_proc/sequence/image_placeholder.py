"""An image in a prompt: which tokens stand for its rows, and where those are. Pure."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from headrace.ipc.messages import Image

UNLIMITED = 1 << 62
MARK_BYTES = 16


@dataclass(eq=False, slots=True)
class ImagePlaceholder:
    """An image of one sequence."""

    image: Image
    key: bytes  # in the encoder cache
    places: "array[int]"  # positions of the tokens that stand for its rows, ascending
    rows: "array[int]" = field(default_factory=lambda: array("i"))  # of the embedding area
    is_whole: bool = False  # adjacent tokens see each other: a chunk has all of them, or none
    is_ready: bool = False  # the embedding is there

    @classmethod
    def of(
        cls,
        image: Image,
        key: bytes,
        tokens: "array[int]",
        image_token: int,
        is_whole: bool = False,
    ) -> "ImagePlaceholder":
        """Find an image's rows in a prompt."""
        span = tokens[image.start : image.start + image.num_tokens]
        places = array("i", [image.start + i for i, t in enumerate(span) if t == image_token])
        assert len(places) == image.num_rows, f"{len(places)} places for {image.num_rows} rows"
        return cls(image, key, places, is_whole=is_whole)

    def within(self, start: int, end: int) -> "tuple[array[int], array[int]]":
        """Return the places from `start` to `end`, and the rows they stand for."""
        part = slice(bisect_left(self.places, start), bisect_left(self.places, end))
        return self.places[part], self.rows[part]

    def run_around(self, position: int) -> tuple[int, int] | None:
        """Return where the adjacent places begin and end that are on both sides of a cut."""
        cut = bisect_left(self.places, position)
        if not 0 < cut < len(self.places) or self.places[cut] != position:
            return None
        first, last = cut, cut
        while first > 0 and self.places[first - 1] == self.places[first] - 1:
            first -= 1
        while last + 1 < len(self.places) and self.places[last + 1] == self.places[last] + 1:
            last += 1
        return None if first == cut else (self.places[first], self.places[last] + 1)


def first_unready(images: Iterable[ImagePlaceholder], num_computed: int) -> int:
    """Return the first token that cannot be computed yet, for want of an embedding."""
    for placed in images:
        if not placed.is_ready and placed.places[-1] >= num_computed:
            return placed.places[0]
    return UNLIMITED


def whole_end(images: Iterable[ImagePlaceholder], start: int, end: int, room: int) -> int:
    """Return where a chunk ends that computes all of an image's adjacent tokens, or none.

    Args:
        end: where it would otherwise. Before that, if an image has begun by then. After it, if only
            the image is left to compute, in a step that has `room` for so many.
    """
    for placed in images:
        run = placed.run_around(end) if placed.is_whole else None
        if run is not None:
            if run[0] > start:
                return run[0]
            return run[1] if run[1] - start <= room else start
    return end


def page_marks(images: Iterable[ImagePlaceholder], page_tokens: int) -> dict[int, bytes]:
    """Return what pages hold besides tokens: which images begin there, and where."""
    marks: dict[int, bytes] = {}
    for placed in images:
        page, place = divmod(placed.places[0], page_tokens)
        content = marks.get(page, b"") + place.to_bytes(4, "little") + placed.image.key
        marks[page] = blake2b(content, digest_size=MARK_BYTES).digest()
    return marks
