"""The inputs of kernels in a step, derived on the device from one small array.

A step is sent as one array of int32. It begins with the numbers of tokens, sequences and logit
rows. The token ids follow, where -1 - r is the token that was drawn for row r of the step before.
Where the model has positions in three parts, these are next. Then come the first token of each
sequence and the end of the last one. The same of its pages follows: those that its keys take. The
position of each sequence's first token, the slot of its adapter, the logit rows and the pages by
sequence are next. Where the model has states, their slots are last.

Rows of images, and what sees later tokens, are sent apart: steps with them have no graph.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.attention.kv_pages import HeadSizes
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Schedule, Stretches
from headrace.engine_proc.worker.cuda.flashinfer_attention import FlashInferAttention
from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.host_to_device import sent
from headrace.engine_proc.worker.cuda.kernels.rope_kv_store import Rotations
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import ExpertTiles
from headrace.engine_proc.worker.execution.executor import Batch, Int32s
from headrace.engine_proc.worker.models.specs.decoder_spec import QueryTemperature

HEADER = tl.constexpr(3)
ROPE_PARTS = 3  # of a position, where a model has images: time, height and width
STATE_PARTS = 3  # of a sequence, where a model has states; see `StateMoves.slots`
BLOCK = 128


@dataclass(frozen=True)
class StepInputs:
    """A step, token by token.

    Sequences that are missing have no tokens. Tokens that are missing are 0, and belong to a
    sequence without keys behind all others.
    """

    token_ids: Tensor  # [tokens], int32
    positions: Tensor  # [tokens], int32; -1 is padding
    rope_positions: Tensor  # [tokens, 3], int32, or [tokens, 0]; padding is 0
    kv_rows: Tensor  # [tokens], int64, page * page_tokens + row of the page; -1 is nowhere
    query_starts: Tensor  # [sequences + 2], int32
    num_keys: Tensor  # [sequences + 1], int32, up to each one's last token in the step
    page_table: Tensor  # [sequences + 1, max_pages], int32, as far as a sequence has pages
    logit_rows: Tensor  # [rows], int32; padding is 0
    adapters: Tensor  # [tokens], int32, slots; -1 is none, and padding


@dataclass(frozen=True)
class ImageRows:
    """Of a step that has some, on the device."""

    tokens: Tensor  # int64, those that come in as rows of images,
    parts: Tensor  # and these rows, [1 + deepstack, tokens, hidden_size]


@dataclass(frozen=True)
class ImageInputs:
    """Of a step that has some of these, on the device. Such a step has no graph."""

    rows: ImageRows | None
    last_seen: Tensor | None  # [tokens], int32, the last position that each sees; None: its own


@dataclass(frozen=True)
class DeviceStep:
    """A batch, on the device."""

    token_ids: Tensor  # [tokens], int32
    kv_rows: Tensor  # [tokens], int64
    stretches: Stretches
    schedules: dict[tuple[HeadSizes, int | None, bool], Schedule]  # by heads and windows of layers
    logit_rows: Tensor  # [rows], int32
    rotations: list[Rotations]  # by the spec's `ropes`
    query_factors: dict[QueryTemperature, Tensor]  # each [tokens], fp32
    images: ImageInputs | None = None
    prompts: FlashInferAttention | None = None  # attends in our kernel's place
    heads: ExpertTiles | None = None  # of tokens' heads, where attention is latent
    moves: StateMoves | None = None  # of sequences' states, where there are some


def packed_size(most: Sizes, max_pages: int, rope_parts: int = 0, state_parts: int = 0) -> int:
    """Return how many numbers the largest step is."""
    per_sequence = most.num_sequences * (4 + max_pages + state_parts)
    return int(HEADER) + most.num_tokens * (1 + rope_parts) + per_sequence + 2 + most.num_rows


def pack(
    batch: Batch, page_tokens: int, out: Int32s, rope_parts: int = 0, state_parts: int = 0
) -> tuple[Sizes, int]:
    """Write a step as it is sent; return its sizes, and how many numbers it is.

    Args:
        rope_parts: ROPE_PARTS, or 0 where the model has one position for all.
        state_parts: STATE_PARTS, or 0 where the model has no states.
    """
    cuts = np.flatnonzero(batch.sequences[1:] != batch.sequences[:-1]) + 1
    firsts = np.concatenate([[0], cuts])
    ends = np.append(firsts[1:], len(batch.sequences))
    own, positions = batch.sequences[firsts], batch.positions[firsts]
    ids, rows = batch.token_ids, batch.logit_rows
    if batch.token_sources is not None:
        ids = np.where(batch.token_sources >= 0, -1 - batch.token_sources, ids)
    sizes = Sizes(len(ids), len(own), len(rows))
    header = (sizes.num_tokens, sizes.num_sequences, sizes.num_rows)
    slots = np.full(len(own), -1, np.int32) if batch.adapters is None else batch.adapters[own]
    counts = -(-(positions + ends - firsts) // page_tokens)
    page_starts = np.append(0, counts.cumsum())
    width = batch.page_table.shape[1]
    assert counts.max() <= width
    places = np.repeat(own * width - page_starts[:-1], counts) + np.arange(page_starts[-1])
    pages = batch.page_table.reshape(-1)[places]
    parts = np.repeat(batch.positions, rope_parts)
    if rope_parts and batch.rope_positions is not None:
        parts = batch.rope_positions.reshape(-1)
    starts = (firsts, [len(ids)], page_starts)
    states = state_slots(batch, own, ends)[:, :state_parts].reshape(-1)
    columns = (header, ids, parts, *starts, positions, slots, rows, pages, states)
    end = 0
    for column in columns:
        start, end = end, end + len(column)
        out[start:end] = column
    return sizes, end


def state_slots(batch: Batch, sequences: Int32s, ends: npt.NDArray[np.int64]) -> Int32s:
    """Return the state slots of sequences whose tokens end there; see `StateMoves.slots`.

    A batch without slots reads and writes none.
    """
    columns = np.full((len(sequences), STATE_PARTS), -1, np.int32)
    columns[:, 2] = ends
    for part, column in enumerate((batch.state_in, batch.state_out, batch.state_ends)):
        if column is not None:
            columns[:, part] = column[sequences]
    return columns


def image_inputs(
    batch: Batch, device: torch.device, dtype: torch.dtype, num_parts: int
) -> ImageInputs | None:
    """Send what a batch has of images to the device; None is that it has nothing.

    Args:
        num_parts: of a row: what comes in, and what is added behind the first layers.
    """
    rows = image_rows(batch, device, dtype, num_parts)
    if rows is None and batch.last_seen is None:
        return None
    seen = batch.last_seen
    return ImageInputs(rows, None if seen is None else sent(torch.tensor(seen), device))


def image_rows(
    batch: Batch, device: torch.device, dtype: torch.dtype, num_parts: int
) -> ImageRows | None:
    """Do as `image_inputs`, for the rows alone."""
    if batch.embed_rows is None or batch.embeds is None:
        return None
    tokens = np.flatnonzero(batch.embed_rows >= 0)
    if not len(tokens):
        return None
    rows = batch.embeds[batch.embed_rows[tokens]]
    parts = np.stack(np.split(rows, num_parts, axis=1))
    return ImageRows(
        tokens=sent(torch.from_numpy(tokens), device),
        parts=sent(torch.from_numpy(parts).to(dtype), device),
    )


def prepare_inputs(
    packed: Tensor,
    drawn: Tensor,
    sizes: Sizes,
    max_pages: int,
    page_tokens: int,
    rope_parts: int = 0,
) -> StepInputs:
    """Derive a step's inputs.

    Args:
        packed: [numbers], int32, a step that `sizes` hold.
        drawn: [rows], int32, the tokens of the step before.
        rope_parts: with which the step is packed.
    """

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=packed.device)

    inputs = StepInputs(
        token_ids=empty(sizes.num_tokens),
        positions=empty(sizes.num_tokens),
        rope_positions=empty(sizes.num_tokens, rope_parts),
        kv_rows=empty(sizes.num_tokens, dtype=torch.int64),
        query_starts=empty(sizes.num_sequences + 2),
        num_keys=empty(sizes.num_sequences + 1),
        page_table=empty(sizes.num_sequences + 1, max_pages),
        logit_rows=empty(sizes.num_rows),
        adapters=empty(sizes.num_tokens),
    )
    inputs_kernel[(sizes.num_sequences + 1,)](
        inputs.token_ids,
        inputs.positions,
        inputs.rope_positions,
        inputs.kv_rows,
        inputs.query_starts,
        inputs.num_keys,
        inputs.page_table,
        inputs.logit_rows,
        inputs.adapters,
        packed,
        drawn,
        sizes.num_tokens,
        sizes.num_sequences,
        sizes.num_rows,
        max_pages,
        PAGE_TOKENS=page_tokens,
        ROPE_PARTS=rope_parts,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    return inputs


@triton.jit(do_not_specialize=["max_tokens", "max_sequences", "max_rows"])
def inputs_kernel(
    token_ids: tl.tensor,
    positions: tl.tensor,
    rope_positions: tl.tensor,
    kv_rows: tl.tensor,
    query_starts: tl.tensor,
    num_keys: tl.tensor,
    page_table: tl.tensor,
    logit_rows: tl.tensor,
    adapters: tl.tensor,
    packed: tl.tensor,
    drawn: tl.tensor,
    max_tokens: tl.tensor,
    max_sequences: tl.tensor,
    max_rows: tl.tensor,
    max_pages: tl.tensor,
    PAGE_TOKENS: tl.constexpr,
    ROPE_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    num_tokens, num_sequences, num_rows = tl.load(packed), tl.load(packed + 1), tl.load(packed + 2)
    given_ids = packed + HEADER
    given_parts = given_ids + num_tokens
    starts = given_parts + num_tokens * ROPE_PARTS
    page_starts = starts + num_sequences + 1
    first_positions = page_starts + num_sequences + 1
    given_slots = first_positions + num_sequences
    given_rows = given_slots + num_sequences
    column = tl.arange(0, BLOCK)
    if sequence >= num_sequences:
        tl.store(query_starts + sequence, num_tokens)
        tl.store(num_keys + sequence, 0)
    if sequence == max_sequences:
        tl.store(query_starts + sequence + 1, max_tokens)
        for first in range(num_tokens, max_tokens, BLOCK):
            token = first + column
            is_token = token < max_tokens
            tl.store(token_ids + token, 0, mask=is_token)
            tl.store(positions + token, -1, mask=is_token)
            tl.store(kv_rows + token, -1, mask=is_token)
            for part in tl.static_range(ROPE_PARTS):
                tl.store(rope_positions + token * ROPE_PARTS + part, 0, mask=is_token)
            tl.store(adapters + token, -1, mask=is_token)
        for first in range(0, max_rows, BLOCK):
            row = first + column
            given = tl.load(given_rows + row, mask=row < num_rows, other=0)
            tl.store(logit_rows + row, given, mask=row < max_rows)
    if sequence >= num_sequences:
        return
    start, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    first_position = tl.load(first_positions + sequence)
    slot, first_page = tl.load(given_slots + sequence), tl.load(page_starts + sequence)
    num_pages = tl.load(page_starts + sequence + 1) - first_page
    pages = given_rows + num_rows + first_page
    tl.store(query_starts + sequence, start)
    tl.store(num_keys + sequence, first_position + end - start)
    for first in range(0, num_pages, BLOCK):
        is_page = first + column < num_pages
        page = tl.load(pages + first + column, mask=is_page, other=0)
        place = sequence.to(tl.int64) * max_pages + first
        tl.store(page_table + place + column, page, mask=is_page)
    for first in range(start, end, BLOCK):
        token = first + column
        is_token = token < end
        given = tl.load(given_ids + token, mask=is_token, other=0)
        relayed = tl.load(drawn - 1 - given, mask=is_token & (given < 0), other=0)
        tl.store(token_ids + token, tl.where(given < 0, relayed, given), mask=is_token)
        position = first_position + token - start
        tl.store(positions + token, position, mask=is_token)
        tl.store(adapters + token, slot, mask=is_token)
        for part in tl.static_range(ROPE_PARTS):
            place = token * ROPE_PARTS + part
            given_part = tl.load(given_parts + place, mask=is_token, other=0)
            tl.store(rope_positions + place, given_part, mask=is_token)
        page = tl.load(pages + position // PAGE_TOKENS, mask=is_token, other=0).to(tl.int64)
        tl.store(kv_rows + token, page * PAGE_TOKENS + position % PAGE_TOKENS, mask=is_token)


def prepare_moves(
    packed: Tensor, inputs: StepInputs, sizes: Sizes, rope_parts: int = 0
) -> StateMoves:
    """Derive how the states of a step's sequences move.

    Args:
        packed, sizes, rope_parts: as of `prepare_inputs`; the step is packed with states.
        inputs: what that has derived.
    """
    moves = StateMoves(
        packed.new_empty(sizes.num_tokens),
        inputs.query_starts,
        packed.new_empty(sizes.num_sequences + 1, STATE_PARTS),
        inputs.positions,
    )
    moves_kernel[(sizes.num_sequences + 1,)](
        moves.sequences,
        moves.slots,
        inputs.query_starts,
        packed,
        ROPE_PARTS=rope_parts,
        PARTS=STATE_PARTS,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    return moves


@triton.jit
def moves_kernel(
    sequences: tl.tensor,
    slots: tl.tensor,
    query_starts: tl.tensor,
    packed: tl.tensor,
    ROPE_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    num_tokens, num_sequences, num_rows = tl.load(packed), tl.load(packed + 1), tl.load(packed + 2)
    page_starts = packed + HEADER + num_tokens * (1 + ROPE_PARTS) + num_sequences + 1
    pages = page_starts + 3 * num_sequences + 1 + num_rows
    given = pages + tl.load(page_starts + num_sequences, mask=num_sequences > 0, other=0)
    for part in tl.static_range(PARTS):
        place = sequence * PARTS + part
        slot = tl.load(given + place, mask=sequence < num_sequences, other=-1)
        tl.store(slots + place, slot)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        tl.store(sequences + token, sequence, mask=token < end)


def reference_moves(batch: Batch, inputs: StepInputs, sizes: Sizes) -> StateMoves:
    """Do as `prepare_moves`, in plain torch, from the batch."""
    query_starts = inputs.query_starts
    counts = query_starts.diff().long()
    ends = query_starts[1:].cpu().numpy().astype(np.int64)
    firsts = np.flatnonzero(np.diff(batch.sequences, prepend=-1))
    own = batch.sequences[firsts]
    slots = torch.full((sizes.num_sequences + 1, STATE_PARTS), -1).to(query_starts)
    slots[: len(own)] = torch.from_numpy(state_slots(batch, own, ends[: len(own)]))
    sequences = torch.arange(len(counts)).to(query_starts).repeat_interleave(counts)
    return StateMoves(sequences, query_starts, slots, inputs.positions)


def reference(
    packed: Tensor,
    drawn: Tensor,
    sizes: Sizes,
    max_pages: int,
    page_tokens: int,
    rope_parts: int = 0,
) -> StepInputs:
    """Do as `prepare_inputs`, in plain torch."""
    num_tokens, num_sequences, num_rows = packed[:3].tolist()
    by_sequence = (num_sequences + 1, num_sequences + 1, num_sequences, num_sequences)
    counts = (num_tokens, num_tokens * rope_parts, *by_sequence, num_rows)
    columns = packed[3 : 3 + sum(counts)].split_with_sizes(counts)
    ids, parts, starts, page_starts, first_positions, slots, rows = columns
    pages = packed[3 + sum(counts) :]  # and states
    relayed = drawn[(-1 - ids).clamp(min=0).long()]
    inputs = StepInputs(
        token_ids=torch.zeros(sizes.num_tokens).to(packed),
        positions=torch.full((sizes.num_tokens,), -1).to(packed),
        rope_positions=torch.zeros(sizes.num_tokens, rope_parts).to(packed),
        kv_rows=torch.full((sizes.num_tokens,), -1, device=packed.device),
        query_starts=torch.full((sizes.num_sequences + 2,), num_tokens).to(packed),
        num_keys=torch.zeros(sizes.num_sequences + 1).to(packed),
        page_table=torch.zeros(sizes.num_sequences + 1, max_pages).to(packed),
        logit_rows=torch.zeros(sizes.num_rows).to(packed),
        adapters=torch.full((sizes.num_tokens,), -1).to(packed),
    )
    inputs.rope_positions[:num_tokens] = parts.view(num_tokens, rope_parts)
    inputs.token_ids[:num_tokens] = torch.where(ids < 0, relayed, ids)
    inputs.query_starts[:num_sequences] = starts[:-1]
    inputs.query_starts[-1] = sizes.num_tokens
    inputs.logit_rows[:num_rows] = rows
    for sequence in range(num_sequences):
        own = pages[slice(*page_starts[sequence : sequence + 2].tolist())]
        inputs.page_table[sequence, : len(own)] = own
        tokens = slice(*starts[sequence : sequence + 2].tolist())
        count = tokens.stop - tokens.start
        at = first_positions[sequence].long() + torch.arange(count, device=packed.device)
        page = inputs.page_table[sequence, at // page_tokens].long()
        inputs.positions[tokens] = at.int()
        inputs.adapters[tokens] = slots[sequence]
        inputs.kv_rows[tokens] = page * page_tokens + at % page_tokens
        inputs.num_keys[sequence] = first_positions[sequence] + count
    return inputs
