"""The image columns of a step: embedding rows, M-RoPE positions, and what sees ahead. Pure.

The format is that of `worker_messages.Step`.
"""

from array import array

from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.mrope import MRopePositions

NONE = -1
OF_TEXT = MRopePositions()


class ImageColumns:
    """Built chunk by chunk; each is empty where no token of the step needs it."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._embed_rows, self._rope_positions = array("i"), array("i")
        self._last_seen = array("i")
        self._has_rows, self._sees_ahead = False, False
        self._is_turned = any(chunk.sequence.rope is not None for chunk in chunks)
        if any(
            chunk.sequence.images or chunk.start < chunk.sequence.num_prefix for chunk in chunks
        ):
            for chunk in chunks:
                self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        start, end = chunk.start, chunk.start + chunk.num_tokens
        rows, last_seen = array("i", [NONE]) * (end - start), array("i", range(start, end))
        for placed in chunk.sequence.images:
            places, own_rows = placed.within(start, end)
            for place, row in zip(places, own_rows, strict=True):
                rows[place - start] = row
            self._has_rows |= bool(places)
            if placed.is_whole:
                self._sees_ahead |= bool(places)
                last = NONE
                for place in reversed(places):
                    follows = place + 1 < end and rows[place + 1 - start] != NONE
                    last = last if follows else place
                    last_seen[place - start] = last
        if (num_prefix := chunk.sequence.num_prefix) > start:
            assert start == 0 and end >= num_prefix, "a step has all of a prompt that sees itself"
            self._sees_ahead = True
            last_seen[:num_prefix] = array("i", [num_prefix - 1]) * num_prefix
        self._embed_rows += rows
        self._last_seen += last_seen
        if self._is_turned:
            rope = chunk.sequence.rope or OF_TEXT
            self._rope_positions += rope.of(start, end - start)

    @property
    def embed_rows(self) -> bytes:
        """Row of the embedding area for each image token."""
        return self._embed_rows.tobytes() if self._has_rows else b""

    @property
    def rope_positions(self) -> bytes:
        """Three positions of each token."""
        return self._rope_positions.tobytes()

    @property
    def last_seen(self) -> bytes:
        """The last position each token sees: that of an image's adjacent rows, or of a prefix."""
        return self._last_seen.tobytes() if self._sees_ahead else b""
