"""The way of states through a step: each sequence reads its own from one slot, and writes another.

A slot is the fp32 state of a sequence over all layers. No slot is read and written in one step, so
a step may be run again. Tokens behind the end of the written state are drafts: they change no slot.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class StateMoves:
    """The sequences of a step, and their slots. Padding tokens are of none."""

    sequences: Tensor  # [tokens], int32; padding is behind all others
    query_starts: Tensor  # [sequences + 1 or more], int32, the first token of each
    # [sequences + 1, 3], int32: the slot that is read, the one that is written, and the token that
    # the written state ends before. -1 is no slot.
    slots: Tensor
    positions: Tensor  # [tokens], int32, in their sequences, whose tokens follow each other

    @property
    def num_sequences(self) -> int:
        """How many sequences there may be."""
        return len(self.slots) - 1


@triton.jit
def load_move(slots: tl.tensor, sequence: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the slots that sequences read and write, and the token that the state ends before."""
    move = slots + sequence * 3
    return tl.load(move).to(tl.int64), tl.load(move + 1).to(tl.int64), tl.load(move + 2)


@triton.jit
def load_state(
    place: tl.tensor, slot: tl.tensor, stride: tl.tensor, is_number: tl.tensor
) -> tl.tensor:
    """Return a part of the state in a slot, given its place in slot 0. No slot has zeros."""
    state = tl.zeros(is_number.shape, tl.float32)
    if slot >= 0:
        state = tl.load(place + slot * stride, mask=is_number, other=0.0)
    return state


@triton.jit
def clear_rows(
    place: tl.tensor, stride: tl.constexpr, start: tl.tensor, end: tl.tensor, is_number: tl.tensor
) -> None:
    """Write zeros for padding, which is of no sequence."""
    place += start.to(tl.int64) * stride
    for _ in range(start, end):
        tl.store(place, 0.0, mask=is_number)
        place += stride


def reference(states: Tensor, moves: StateMoves, run: Callable[[slice, Tensor], Tensor]) -> None:
    """Move the states of all sequences, in plain torch.

    Args:
        states: [slots, numbers].
        run: computes rows of a sequence behind a state; returns the state behind them.
    """
    starts = moves.query_starts.tolist()
    for sequence, (read, written, end) in enumerate(moves.slots[:-1].tolist()):
        start, stop = starts[sequence], starts[sequence + 1]
        if start == stop:
            continue
        before = states[read] if read >= 0 else torch.zeros_like(states[0])
        after = run(slice(start, end), before)
        if written >= 0:
            states[written] = after
        if end < stop:
            run(slice(end, stop), after)
