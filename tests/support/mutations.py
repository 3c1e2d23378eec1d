"""Inputs that are nearly right: a seed, changed here and there. Pure."""

import random
from collections.abc import Sequence

EDGES = (0, 1, 2, 3, 7, 8, 31, 32, 127, 128, 255, 256, (1 << 15), (1 << 16) - 1, (1 << 31) - 1)
EDGES += ((1 << 31), (1 << 32) - 1, (1 << 63) - 1, (1 << 63), (1 << 64) - 1)


def mutated(seed: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Return a seed with a few changes, each of a byte, a number or a piece of it."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 2, 4, 8, 16, 64))
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + 1] = rng.randbytes(1)
            case 2:
                width = rng.choice((1, 2, 4, 8))
                edge = rng.choice(EDGES) % (1 << 8 * width)
                data[at : at + width] = edge.to_bytes(width, rng.choice(("little", "big")))
            case 3:
                del data[at : at + size]
            case 4:
                data[at:at] = data[at : at + size] * rng.choice((1, 2, 16))
            case 5:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                data[at : at + size] = other[start : start + size]
            case 6 if rng.random() < 0.3:
                del data[at:]
    return bytes(data)


class Pieces:
    """Values cut from bytes, one after the other; zeros at their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        """Whether all has been used."""
        return self._at >= len(self._data)

    def number(self, limit: int) -> int:
        """Return a number below `limit`."""
        width = (limit.bit_length() + 7) // 8
        return int.from_bytes(self.take(width), "little") % limit

    def take(self, size: int) -> bytes:
        """Return so many bytes."""
        self._at += size
        return self._data[self._at - size : self._at].ljust(size, b"\0")

    def some(self, limit: int) -> bytes:
        """Return some bytes, fewer than `limit`."""
        return self.take(self.number(limit))
