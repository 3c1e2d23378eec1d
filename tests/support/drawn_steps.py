"""Draws steps that compute several sequences in chunks, for properties of executors."""

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

NUM_SEQUENCES = 4
MOST_TOKENS = 60  # of a sequence in a step
Part = tuple[int, int, int]  # sequence, its first position, the position behind its last


def drawn_steps(data: st.DataObject, length: int, longest: int) -> Iterator[list[Part]]:
    """Yield steps until sequence 0 has `length` tokens; others have at most `longest`."""
    done = dict.fromkeys(range(NUM_SEQUENCES), 0)
    while done[0] < length:
        parts = []
        for sequence in data.draw(st.permutations(range(NUM_SEQUENCES))):
            count = data.draw(st.integers(1 if sequence == 0 else 0, MOST_TOKENS))
            end = min(done[sequence] + count, length if sequence == 0 else longest)
            if end > done[sequence]:
                parts.append((sequence, done[sequence], end))
        yield parts
        done |= {sequence: end for sequence, _, end in parts}


def assert_bits_alone(
    parts: list[Part], logits: npt.NDArray[np.float32], alone: npt.NDArray[np.float32]
) -> None:
    """Assert that the rows of sequence 0 are those that it has alone."""
    first = 0
    for sequence, start, stop in parts:
        if sequence == 0:
            np.testing.assert_array_equal(logits[first : first + stop - start], alone[start:stop])
        first += stop - start
