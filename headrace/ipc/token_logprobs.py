"""Log probabilities as bytes, as in `StepResult` and `StepOutput`.

A row is of one token: f32 log probability and i32 rank, then pairs of i32 token and f32 log
probability, the likeliest first. Python's objects would take ten times the memory.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

ROW = struct.Struct("<fi")  # log probability, rank
PAIR = struct.Struct("<if")  # token, log probability


class TokenLogprob(NamedTuple):
    """The log probability of a token, and the top tokens in its place, best first."""

    logprob: float  # natural logarithm
    rank: int  # 1 is the likeliest
    top: list[tuple[int, float]]  # token, log probability

    @classmethod
    def unpack(cls, row: bytes | bytearray | memoryview) -> "TokenLogprob":
        """Return the values of a row."""
        logprob, rank = ROW.unpack_from(row)
        return cls(logprob, rank, list(PAIR.iter_unpack(row[ROW.size :])))

    def pack(self) -> bytes:
        """Return the row with these values."""
        return ROW.pack(self.logprob, self.rank) + b"".join(PAIR.pack(*one) for one in self.top)


def num_row_bytes(num_top: int) -> int:
    """Return the size of a row with `num_top` likeliest tokens."""
    return ROW.size + num_top * PAIR.size


def packed(tokens: Iterable[TokenLogprob]) -> bytes:
    """Return the rows of several tokens, concatenated."""
    return b"".join(token.pack() for token in tokens)
