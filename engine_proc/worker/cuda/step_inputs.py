"""What kernels need to know of a step, derived on the device from the little that is sent there.

Slots hold what outlives a step: how many tokens of a sequence have been computed, its pages, and
the token that was drawn last, so that a step can be launched before the host has seen that token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True)
class Slots:
    """Sequences, on the device."""

    page_table: Tensor  # [slots, max_pages], int32
    num_computed: Tensor  # [slots], int32, tokens whose keys are in the pages
    last_tokens: Tensor  # [slots], int32


@dataclass(frozen=True)
class StepInputs:
    """A step, token by token."""

    token_ids: Tensor  # [tokens], int32
    positions: Tensor  # [tokens], int32
    kv_rows: Tensor  # [tokens], int64, page * page_tokens + row of the page
    num_keys: Tensor  # [sequences], int32, up to each one's last token in the step


def prepare_inputs(
    given_ids: Tensor, query_starts: Tensor, slots: Tensor, state: Slots, page_tokens: int
) -> StepInputs:
    """Derive a step's inputs.

    Args:
        given_ids: [tokens], int32; -1 is the token that was drawn last.
        query_starts: [sequences + 1], int32. What is behind the last start is padding: token 0 at
            position 0, whose keys go nowhere.
        slots: [sequences], int32, of `state`.
    """
    num_tokens, num_sequences = len(given_ids), len(slots)
    assert len(query_starts) == num_sequences + 1
    inputs = StepInputs(
        token_ids=torch.zeros_like(given_ids),
        positions=torch.zeros_like(given_ids),
        kv_rows=torch.full_like(given_ids, -1, dtype=torch.int64),
        num_keys=torch.empty_like(slots),
    )
    if num_tokens and num_sequences:
        inputs_kernel[(num_sequences,)](
            inputs.token_ids,
            inputs.positions,
            inputs.kv_rows,
            inputs.num_keys,
            given_ids,
            query_starts,
            slots,
            state.num_computed,
            state.last_tokens,
            state.page_table,
            state.page_table.stride(0),
            PAGE_TOKENS=page_tokens,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return inputs


@triton.jit
def inputs_kernel(
    token_ids: tl.tensor,
    positions: tl.tensor,
    kv_rows: tl.tensor,
    num_keys: tl.tensor,
    given_ids: tl.tensor,
    query_starts: tl.tensor,
    slots: tl.tensor,
    num_computed: tl.tensor,
    last_tokens: tl.tensor,
    page_table: tl.tensor,
    table_stride: tl.tensor,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    first_position = tl.load(num_computed + slot)
    last_token = tl.load(last_tokens + slot)
    tl.store(num_keys + sequence, first_position + end - start)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_token = token < end
        given = tl.load(given_ids + token, mask=is_token, other=0)
        tl.store(token_ids + token, tl.where(given < 0, last_token, given), mask=is_token)
        position = first_position + token - start
        tl.store(positions + token, position, mask=is_token)
        place = page_table + slot * table_stride + position // PAGE_TOKENS
        page = tl.load(place, mask=is_token, other=0).to(tl.int64)
        tl.store(kv_rows + token, page * PAGE_TOKENS + position % PAGE_TOKENS, mask=is_token)


def reference(
    given_ids: Tensor, query_starts: Tensor, slots: Tensor, state: Slots, page_tokens: int
) -> StepInputs:
    """Do as `prepare_inputs`, in plain torch."""
    inputs = StepInputs(
        token_ids=torch.zeros_like(given_ids),
        positions=torch.zeros_like(given_ids),
        kv_rows=torch.full_like(given_ids, -1, dtype=torch.int64),
        num_keys=torch.empty_like(slots),
    )
    starts = query_starts.tolist()
    for sequence, slot in enumerate(slots.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        positions = int(state.num_computed[slot]) + torch.arange(end - start)
        pages = state.page_table[slot].cpu()[positions // page_tokens].long()
        given = given_ids[start:end]
        inputs.token_ids[start:end] = torch.where(given < 0, state.last_tokens[slot], given)
        inputs.positions[start:end] = positions
        inputs.kv_rows[start:end] = pages * page_tokens + positions % page_tokens
        inputs.num_keys[sequence] = int(state.num_computed[slot]) + end - start
    return inputs
