"""Blocks of tokens, from one to the next of which a recurrence goes.

A block is BLOCK_TOKENS tokens, and begins at a position that BLOCK_TOKENS divides. What a token
reads is computed of the matrices at its block's beginning, and of the block's rows up to its own,
by tensor cores. So chunks change no bit, and a decode step has the bits of a prompt.

A slot has the matrices at the beginning of the block that its state ends in. Behind them it keeps
the rows of that block's tokens: how far each decays, and what it adds to the matrices.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, dot, rounded, softplus
from headrace.engine_proc.worker.cuda.mixers.state_moves import (
    StateMoves,
    clear_rows,
    load_move,
    load_state,
)
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    GatedDeltaNetSpec,
    Mamba2Spec,
    Mixer,
)

BLOCK_TOKENS = 16
TOKENS = tl.constexpr(BLOCK_TOKENS)
MOST_ROWS = BLOCK_TOKENS - 1  # a whole block is in the matrices
ALIGNED = 16  # numbers of fp32, at which parts of a slot begin
BLOCK_COLUMNS = 32  # of a matrix, that a program has
NUM_STAGES = 2


@dataclass(frozen=True)
class RowSizes:
    """How many numbers a slot keeps of a token."""

    steps: int  # fp32
    keys: int  # of the type of products
    values: int  # of the same type

    def parts(self, dtype: torch.dtype) -> list[int]:
        """Return the sizes of a block's steps, keys and values, in numbers of fp32."""
        of_products = [MOST_ROWS * size * dtype.itemsize for size in (self.keys, self.values)]
        sizes = 4 * MOST_ROWS * self.steps, *of_products
        return [cdiv(size, 4 * ALIGNED) * ALIGNED for size in sizes]

    def numbers(self, dtype: torch.dtype) -> int:
        """Return the size of a block's rows, in numbers of fp32."""
        return sum(self.parts(dtype))


@dataclass(frozen=True)
class KeptRows:
    """The rows that slots keep, [slots, MOST_ROWS * numbers of a token]."""

    steps: Tensor
    keys: Tensor
    values: Tensor

    def of_token(self, slot: int, token: int) -> list[Tensor]:
        """Return views of what a slot keeps of a block's token."""
        parts = self.steps, self.keys, self.values
        return [part[slot].view(MOST_ROWS, -1)[token] for part in parts]

    @property
    def strides(self) -> tuple[int, int]:
        """How far slots lie apart, in numbers of fp32 and of the type of products."""
        return self.steps.stride(0), self.keys.stride(0)


def num_warps(block_rows: int) -> int:
    """Return the warps of a program, whose registers have the rows of a matrix."""
    return 8 if block_rows > 128 else 4


def row_sizes(mixer: Mixer) -> RowSizes | None:
    """Return what is kept of a token, if a recurrence goes from block to block."""
    match mixer:
        case GatedDeltaNetSpec() if not mixer.gate_rank:
            return RowSizes(mixer.num_value_heads, mixer.key_width, mixer.value_width)
        case Mamba2Spec():
            return RowSizes(len(mixer.heads), mixer.group_numbers, mixer.inner_size)
    return None


def slot_numbers(mixer: Mixer | None, dtype: torch.dtype) -> int:
    """Return the numbers of a slot in a layer, kept rows included."""
    if mixer is None:
        return 0
    sizes = row_sizes(mixer)
    return mixer.state_numbers + (0 if sizes is None else sizes.numbers(dtype))


def kept_rows(sizes: RowSizes, states: Tensor, dtype: torch.dtype) -> KeptRows:
    """Return a view of the rows that are last in slots.

    Args:
        states: [slots, numbers], fp32.
    """
    parts = sizes.parts(dtype)
    steps, keys, values = states[:, states.shape[1] - sum(parts) :].split_with_sizes(parts, 1)
    return KeptRows(
        steps[:, : MOST_ROWS * sizes.steps],
        keys.view(dtype)[:, : MOST_ROWS * sizes.keys],
        values.view(dtype)[:, : MOST_ROWS * sizes.values],
    )


@triton.jit
def find_part(
    out: tl.tensor,
    query_starts: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return what a program has: a sequence, a head, and columns of its matrix, [ROWS, COLUMNS].

    These are the sequence and the head, where its tokens in the step begin and end, rows and
    columns, and which of them there are. The programs behind all sequences have no tokens. They
    clear the output of padding, of which a row has WIDTH numbers.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    row, column = tl.arange(0, BLOCK_ROWS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if sequence == tl.num_programs(0) - 1:
        clear_rows(out + head * COLUMNS + column, WIDTH, start, end, column < COLUMNS)
        end = start
    return sequence, head, start, end, row, column, row < ROWS, column < COLUMNS


@triton.jit
def load_matrix(
    states: tl.tensor,
    slot: tl.tensor,
    stride: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return columns of a head's matrix, and their places in slot 0."""
    place = states + (head * ROWS * COLUMNS + row[:, None] * COLUMNS + column[None, :])
    is_number = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    return load_state(place, slot, stride, is_number), place


@triton.jit
def load_rows(
    kept: tl.tensor, new: tl.tensor, is_kept: tl.tensor, is_new: tl.tensor, is_number: tl.tensor
) -> tl.tensor:
    """Load a block's rows from a slot or from the step, [tokens, numbers]; others are zeros.

    Args:
        kept, new: places, [tokens, numbers].
        is_kept, is_new: [tokens].
        is_number: [numbers].
    """
    before = tl.load(kept, mask=is_kept[:, None] & is_number[None, :], other=0.0)
    own = tl.load(new, mask=is_new[:, None] & is_number[None, :], other=0.0)
    return tl.where(is_kept[:, None], before, own)


@triton.jit
def load_steps(
    kept: tl.tensor,
    new: tl.tensor,
    is_kept: tl.tensor,
    is_new: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor,
) -> tl.tensor:
    """Load how far a block's tokens go, [tokens], those of the step before the softplus."""
    before = tl.load(kept, mask=is_kept, other=0.0)
    own = tl.load(new, mask=is_new, other=0.0).to(tl.float32)
    return tl.where(is_new, softplus(factor * own + bias), before)


@triton.jit
def load_span(
    slots: tl.tensor, positions: tl.tensor, sequence: tl.tensor, start: tl.tensor, end: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the slots that a sequence reads and writes, and positions in it.

    These are where the state ends that is read, where its tokens in the step begin and end, and
    where the written state ends.
    """
    source, target, state_end = load_move(slots, sequence)
    first = tl.load(positions + start)
    known = tl.where(source >= 0, first, 0)
    return source, target, known, first, first + end - start, first + state_end - start


@triton.jit
def store(place: tl.tensor, rows: tl.tensor, is_row: tl.tensor, is_column: tl.tensor) -> None:
    """Write rows, or a matrix."""
    tl.store(place, rows, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def decays_within(logs: tl.tensor, token: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return how far all before a block decays up to each token, and tokens up to later ones.

    Args:
        logs: [tokens], of each token's decay.
        token: [tokens], their numbers.
    Returns:
        The logarithm of the first, [tokens]. The second, [later tokens, tokens]; else 0.
    """
    is_seen = token[:, None] >= token[None, :]
    sums = tl.sum(tl.where(is_seen, logs[None, :], 0.0), 1)
    of_tokens = tl.sum(tl.where(token[:, None] == token[None, :], sums[:, None], 0.0), 0)
    between = tl.minimum(sums[:, None] - of_tokens[None, :], 0.0)  # what is not seen may be large
    return sums, tl.where(is_seen, tl.exp(between), 0.0)


@triton.jit
def dot_rows(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the products of a block's rows with others."""
    return dot(a, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], tl.float32))


@triton.jit
def dot_wide(a: tl.tensor, b: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """Add to fp32 sums the product of two factors, of which one may be wider: fp32.

    Tensor cores multiply that as two numbers of the other's type, the nearest and what it lacks.
    """
    if a.dtype == b.dtype:
        return dot(a, b, sums)
    if a.dtype == tl.float32:
        near = rounded(a, b.dtype)
        return dot(rounded(a - near.to(tl.float32), b.dtype), b, dot(near, b, sums))
    near = rounded(b, a.dtype)
    return dot(a, rounded(b - near.to(tl.float32), a.dtype), dot(a, near, sums))


@triton.jit
def read_block(
    queries: tl.tensor, state: tl.tensor, logs: tl.tensor, weights: tl.tensor, values: tl.tensor
) -> tl.tensor:
    """Return what a block's tokens read of matrices and of each other, [tokens, columns], fp32.

    Args:
        logs: of decays up to each token, [tokens].
        weights: of each other's values, [tokens, tokens], fp32.
    """
    none = tl.zeros([queries.shape[0], state.shape[1]], tl.float32)
    before = dot_wide(queries, state, none) * tl.exp(logs)[:, None]
    return dot_wide(weights, values, before)


@triton.jit
def advance(
    state: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    logs: tl.tensor,
    factors: tl.tensor,
    token: tl.tensor,
) -> tl.tensor:
    """Return the matrices behind a whole block.

    Args:
        logs: of decays up to each token, [tokens].
        factors: of what each token adds, [tokens].
    """
    last = tl.sum(tl.where(token == token.shape[0] - 1, logs, 0.0), 0)
    added = values.to(tl.float32) * (factors * tl.exp(last - logs))[:, None]
    return dot_wide(tl.trans(keys), added, state * tl.exp(last))


class Recurrence(ABC):
    """A recurrence in plain torch, token by token."""

    @abstractmethod
    def row(self, token: int, matrices: Tensor) -> list[Tensor]:
        """Return what is kept of a token, given the matrices before it."""

    @abstractmethod
    def add(self, matrices: Tensor, step: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the matrices behind a token of which this is kept."""

    @abstractmethod
    def read(self, token: int, matrices: Tensor) -> None:
        """Note what a token reads of the matrices behind it."""


def reference(
    recurrence: Recurrence, sizes: RowSizes, states: Tensor, moves: StateMoves, dtype: torch.dtype
) -> None:
    """Run a step token by token, in plain torch, and write the slots of its sequences."""
    kept = kept_rows(sizes, states, dtype)
    matrices = states[:, : states.shape[1] - sizes.numbers(dtype)]
    for sequence, (source, target, end) in enumerate(moves.slots[:-1].tolist()):
        start, stop = moves.query_starts[sequence : sequence + 2].tolist()
        if start == stop:
            continue
        ahead = int(moves.positions[start]) % BLOCK_TOKENS
        begin, rows = torch.zeros_like(matrices[0]), list[list[Tensor]]()
        if source >= 0:
            begin = matrices[source].clone()
            rows = [[part.clone() for part in kept.of_token(source, i)] for i in range(ahead)]
        now = begin
        for row in rows:
            now = recurrence.add(now, *row)
        for token in range(start, stop):
            rows.append(recurrence.row(token, now))
            now = recurrence.add(now, *rows[-1])
            recurrence.read(token, now)
            if (ahead + token + 1 - start) % BLOCK_TOKENS == 0:
                begin, rows = now, []
            if token + 1 == end and target >= 0:
                matrices[target] = begin
                for i, row in enumerate(rows):
                    for part, numbers in zip(kept.of_token(target, i), row, strict=True):
                        part.copy_(numbers)
