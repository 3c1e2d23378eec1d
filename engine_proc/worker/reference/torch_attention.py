"""Attention over paged keys and values in plain torch, sequence by sequence."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.engine_proc.worker.execution.executor import Batch, Int32s, sequence_rows


@dataclass(frozen=True)
class Stretch:
    """The tokens of one sequence in a batch, and where everything they may attend to lies."""

    rows: slice  # of the batch
    positions: Tensor  # [rows]
    last_seen: Tensor | None  # [rows], where it is not their own
    pages: Tensor  # [pages], those of positions 0 to `num_keys` - 1
    num_keys: int


@dataclass(frozen=True)
class Places:
    """A batch, on the device."""

    positions: Tensor  # [tokens]
    pages: Tensor  # [tokens], where each token's keys and values belong ...
    slots: Tensor  # [tokens], ... and the row within that page
    stretches: list[Stretch]


@dataclass(frozen=True)
class Reach:
    """The attention window of a token in its sequence; None is unlimited."""

    before: int | None = None  # positions before its own
    after: int | None = 0
    chunk: int | None = None  # positions before its own chunk of so many are not seen


def place(batch: Batch, page_tokens: int, device: torch.device) -> Places:
    """Find each token's page, and each sequence's tokens."""
    pages = batch.page_table[batch.sequences, batch.positions // page_tokens]
    stretches = []
    for rows in sequence_rows(batch):
        positions = batch.positions[rows]
        num_keys = int(positions[-1]) + 1
        held = batch.page_table[batch.sequences[rows.start], : -(-num_keys // page_tokens)]
        stretches.append(
            Stretch(
                rows,
                to_tensor(positions, device),
                None if batch.last_seen is None else to_tensor(batch.last_seen[rows], device),
                to_tensor(held, device),
                num_keys,
            )
        )
    return Places(
        positions=to_tensor(batch.positions, device),
        pages=to_tensor(pages, device),
        slots=to_tensor(batch.positions % page_tokens, device),
        stretches=stretches,
    )


def to_tensor(numbers: Int32s, device: torch.device) -> Tensor:
    """Return indices as torch takes them."""
    return torch.from_numpy(numbers.astype(np.int64)).to(device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    reach: Reach,
    last_seen: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with the queries at `positions` of one sequence.

    Args:
        q: [queries, heads, head_dim]
        k: [keys, kv_heads, head_dim], from position 0 on
        v: [keys, kv_heads, value_dim]
        last_seen: [queries], the last position each sees, if `reach` does not say it
        sinks: [heads], scores of a key that has no value
    Returns:
        [queries, heads, value_dim]
    """
    num_kv_heads = k.shape[1]
    grouped = q.view(len(q), num_kv_heads, -1, q.shape[2])
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    behind = positions[:, None] - torch.arange(len(k), device=q.device)  # [queries, keys]
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if last_seen is not None:
        hidden |= behind < (positions - last_seen)[:, None]
    elif reach.after is not None:
        hidden |= behind < -reach.after
    if reach.before is not None:
        hidden |= behind > reach.before
    if reach.chunk is not None:
        hidden |= behind > positions[:, None] % reach.chunk
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, len(q), 1)
        scores = torch.cat([scores, column], dim=-1)
    shares = scores.softmax(-1)[..., : len(k)].to(v.dtype)
    return torch.einsum("hgqk,khd->qhgd", shares, v).flatten(1, 2)
