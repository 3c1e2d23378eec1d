"""Sequences of a step, and the slots of their states."""

from collections.abc import Sequence

import numpy as np
import torch

from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves


def moves_of(
    parts: Sequence[tuple[int, int, int]],
    *,
    num_drafts: Sequence[int] = (),
    num_padding: tuple[int, int] = (0, 0),
    firsts: Sequence[int] = (),
    device: torch.device,
) -> StateMoves:
    """Return the moves of a step.

    Args:
        parts: of each sequence its tokens, and the slots that are read and written.
        num_drafts: of its last tokens.
        num_padding: tokens and sequences that are missing.
        firsts: the position of each sequence's first token; default: 0.
    """
    counts = [count for count, _, _ in parts]
    ends = np.cumsum([0, *counts]).tolist()
    drafts = num_drafts or [0] * len(parts)
    slots = [
        (read, written, end - own)
        for (_, read, written), end, own in zip(parts, ends[1:], drafts, strict=True)
    ]
    num_tokens, num_sequences = num_padding
    slots += [(-1, -1, -1)] * (num_sequences + 1)
    sequences = np.repeat(np.arange(len(parts)), counts).tolist()
    sequences += [len(parts) + num_sequences] * num_tokens
    places = firsts or [0] * len(parts)
    positions = [
        first + i for first, count in zip(places, counts, strict=True) for i in range(count)
    ]
    positions += [-1] * num_tokens
    starts = [*ends, *[ends[-1]] * num_sequences, ends[-1] + num_tokens]
    return StateMoves(
        *(
            torch.tensor(numbers, dtype=torch.int32, device=device)
            for numbers in (sequences, starts, slots, positions)
        )
    )
