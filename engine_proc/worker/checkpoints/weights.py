"""Weights under Headrace's own names, as they lie on disk.

A `Weight` is a view into a mapped file, or generates values that no file has. Opening a model reads
only its header. Each executor converts what it loads, once. Readers (`safetensors.py`, `gguf.py`)
open files under the files' own names, which `weight_names.py` translates into these.

Names, with shapes [out, in] as in `torch.nn.Linear`; `{i}` counts layers:

    embed                     [vocab, hidden]
    head                      [vocab, hidden], absent when `tied_head`
    head.bias                 [vocab], with `head_bias`
    norm                      [hidden]; norms of hidden numbers have a `.bias` with `norm_bias`
    positions, token_types    [num_positions or num_token_types, hidden], of encoders, added
    embed_norm                [hidden], of encoders, of what embeddings add up to
    layers.{i}.attn_norm      [hidden], before attention; absent with POST and POST_SUM
    layers.{i}.attn_post_norm [hidden], after attention, with PRE_POST, POST and POST_SUM
    layers.{i}.mlp_norm       [hidden], before the MLP; absent with POST, POST_SUM and PARALLEL
    layers.{i}.mlp_post_norm  [hidden], after the MLP, with PRE_POST, POST and POST_SUM
    layers.{i}.q, .k, .v      [heads * head_dim, hidden], and `.q.bias` … with `qkv_bias`
    layers.{i}.q_norm, k_norm [head_dim] per head, or [heads * head_dim] full width
    layers.{i}.sinks          [heads], with `attention_sinks`
    layers.{i}.o              [hidden, heads * head_dim], `.o.bias` with `output_bias`
    layers.{i}.gate, .up      [intermediate, hidden], biases with `mlp_bias`; a gate: `gated_mlp`
    layers.{i}.down           [hidden, intermediate], `.down.bias` with `mlp_bias`
    layers.{i}.xielu.alpha_p, .alpha_n, .beta, .eps   [1], with the activation XIELU
    layers.{i}.attn_gate      [heads * head_dim, hidden], with `attention_gate`

A gated delta net has these in place of attention:

    layers.{i}.delta.q, .k         [key heads * key_dim, hidden]
    layers.{i}.delta.v, .z         [value heads * value_dim, hidden]
    layers.{i}.delta.b, .a         [value heads, hidden]; with `gate_rank` rows of `a` and `a.bias`
                                   are [value heads * key_dim], and columns of `a` and `z` that many
    layers.{i}.delta.a_in, .z_in   [gate_rank, hidden], with `gate_rank`
    layers.{i}.delta.{q,k,v}.conv  [channels * kernel_size], those of a channel adjacent
    layers.{i}.delta.a.bias, .rate [value heads]
    layers.{i}.delta.gated_norm    [value_dim]; it scales by `w` whatever the other norms do
    layers.{i}.delta.out           [hidden, value heads * value_dim]

A layer with latent attention has these in place of `q`, `k` and `v`:

    layers.{i}.q              [heads * query_dim, hidden], where queries are not compressed, or ...
    layers.{i}.q_a, .q_b      ... [query_rank, hidden] and [heads * query_dim, query_rank]
    layers.{i}.kv_a           [rank + rope_dim, hidden]; `q_a` and `kv_a` have a `.bias` with `bias`
    layers.{i}.q_a_norm       [query_rank]
    layers.{i}.kv_a_norm      [rank]
    layers.{i}.k_b            [heads * rank, nope_dim], of each head transposed
    layers.{i}.v_b            [heads * value_dim, rank]

A layer with a mixture has these in place of `gate`, `up` and `down`; `{e}` counts experts:

    layers.{i}.router              [experts, hidden], `.router.bias` with `router_bias`
    layers.{i}.router.selection_bias   [experts], with `selection_bias`
    layers.{i}.experts.{e}.gate, .up   [intermediate of an expert, hidden], biases: `expert_bias`
    layers.{i}.experts.{e}.down    [hidden, intermediate of an expert], a bias: `expert_bias`
    layers.{i}.shared.gate, .up, .down   as those of an MLP, with `shared_intermediate_size`;
                                   biases: `shared_bias`
    layers.{i}.shared.router       [1, hidden], with `shared_gate`

Gemma 3n and 4 have these, too; `per_layer` with embeddings per layer, `altup` and `laurel` with
several residuals:

    per_layer.embed           [vocab_size of `PerLayerSpec`, layers * size]
    per_layer.proj            [layers * size, hidden], .per_layer.proj_norm [size]
    altup.in.{n}, .out.{n}    [hidden, hidden], of the residuals from 1 on
    layers.{i}.per_layer.gate [size, hidden], .per_layer.out [hidden, size], .per_layer.norm
    layers.{i}.scale          [1], with `layer_scale`
    layers.{i}.altup.router   [residuals, hidden], .altup.norm and .altup.scale [hidden]
    layers.{i}.altup.predict  [residuals^2, residuals], .altup.correct [residuals, residuals]
    layers.{i}.laurel.left    [rank, hidden], .laurel.right [hidden, rank], .laurel.norm [hidden]
    layers.{i}.router.norm, .expert_norm, .expert_post_norm, .shared_post_norm   [hidden], with
                              `own_norms`, and .router.scales [experts] with `expert_scales`

A layer of Mamba-2 has these in place of attention, or beside it:

    layers.{i}.in_z, .in_x    [heads * head_dim, hidden], biases with `input_bias`, as the next two
    layers.{i}.in_b, .in_c    [groups * state_size, hidden]
    layers.{i}.in_dt          [heads, hidden]
    layers.{i}.conv_x, .conv_b, .conv_c   [rows of in_x, in_b or in_c, kernel_size], flat; biases
                              with `conv_bias`
    layers.{i}.dt_bias, .decay, .skip   [heads]; decay is below 0
    layers.{i}.ssm_norm       [heads * head_dim], with `norm_size`
    layers.{i}.out            [hidden, heads * head_dim], a bias with `output_bias`

A layer of Mamba has these in place of attention:

    layers.{i}.in_x, .in_z    [channels, hidden], biases with `bias`, as `out`
    layers.{i}.conv_x         [channels * kernel_size], those of a channel adjacent; a bias with
                              `conv_bias`
    layers.{i}.in_dt          [rank, channels], .in_b and .in_c [state_size, channels]
    layers.{i}.dt_norm        [rank], .b_norm and .c_norm [state_size], with `norms`
    layers.{i}.dt             [channels, rank]
    layers.{i}.dt_bias, .skip [channels]
    layers.{i}.decay          [channels * state_size], below 0, those of a channel adjacent
    layers.{i}.out            [hidden, channels]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints import gguf_blocks


def e4m3_numbers() -> npt.NDArray[np.float32]:
    """Return the number of each byte: 4 bits of exponent, 3 of mantissa; no infinity, one NaN."""
    byte = np.arange(128)
    exponents, mantissas = byte >> 3, byte & 7
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    numbers = np.where(exponents > 0, normal, np.ldexp(mantissas / 8, -6))
    numbers[127] = np.nan
    both: npt.NDArray[np.float32] = np.concatenate([numbers, -numbers]).astype(np.float32)
    return both


E4M3_NUMBERS = e4m3_numbers()


class Format(StrEnum):
    """The storage format of a tensor. Those from Q4_0 on are GGUF's block formats."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    F8_E4M3 = "F8_E4M3"
    I32 = "I32"  # packed codes, which are not decoded here
    I64 = "I64"
    U8 = "U8"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q2_K = "Q2_K"
    Q3_K = "Q3_K"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    IQ4_NL = "IQ4_NL"
    IQ4_XS = "IQ4_XS"
    MXFP4 = "MXFP4"
    IQ1_S = "IQ1_S"  # from here on, no kernel executes them as stored
    IQ1_M = "IQ1_M"
    IQ2_XXS = "IQ2_XXS"
    IQ2_XS = "IQ2_XS"
    IQ2_S = "IQ2_S"
    IQ3_XXS = "IQ3_XXS"
    IQ3_S = "IQ3_S"
    TQ1_0 = "TQ1_0"
    TQ2_0 = "TQ2_0"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in its file, row after row."""

    format: Format
    shape: tuple[int, ...]  # in numbers, rows first; a quantized row is whole blocks
    data: npt.NDArray[np.uint8]  # [bytes] or [rows, bytes], a read-only view into the file

    @classmethod
    def of(cls, numbers: npt.NDArray[np.float32]) -> Self:
        """Return numbers of fp32, copied where they are not one after the other."""
        data = np.ascontiguousarray(numbers, np.float32).reshape(-1).view(np.uint8)
        return cls(Format.F32, numbers.shape, data)

    @property
    def block_numbers(self) -> int:
        """Number of values of a row in a block."""
        block = gguf_blocks.BLOCK_FORMATS.get(self.format)
        return 1 if block is None else block.numbers

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Decode to a new array of `shape`. Exact: each stored number is an fp32 number."""
        match self.format:
            case Format.F32:
                numbers = self.data.view("<f4").astype(np.float32)
            case Format.F16:
                numbers = self.data.view("<f2").astype(np.float32)
            case Format.BF16:  # the upper half of an fp32
                numbers = (self.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
            case Format.F8_E4M3:
                numbers = E4M3_NUMBERS.take(self.data, mode="wrap")
            case _:
                numbers = gguf_blocks.decode(self.format, self.data)
        return numbers.reshape(self.shape)

    def to_q8_0(self) -> "StoredTensor":
        """Round to 8 bits, in groups of 32 with a scale. Rows must be whole groups."""
        blocks = gguf_blocks.encode_q8_0(self.to_float32())
        return StoredTensor(Format.Q8_0, self.shape, blocks.reshape(-1))

    def to_q4_0(self) -> "StoredTensor":
        """Round to 4 bits, in groups of 32 with a scale. Rows must be whole groups."""
        blocks = gguf_blocks.encode_q4_0(self.to_float32())
        return StoredTensor(Format.Q4_0, self.shape, blocks.reshape(-1))

    def rows(self, start: int, stop: int) -> "StoredTensor":
        """Return rows `start` to `stop` as a view: a fused matrix is stored row after row."""
        return StoredTensor(self.format, (stop - start, *self.shape[1:]), self.lines[start:stop])

    def columns(self, start: int, stop: int) -> "StoredTensor":
        """Return columns `start` to `stop` of a matrix, whole blocks, as a view."""
        num_rows, num_cols = self.shape
        assert start % self.block_numbers == 0
        assert stop % self.block_numbers == 0 or stop == num_cols
        lines = self.lines
        first, last = (lines.shape[1] * column // num_cols for column in (start, stop))
        return StoredTensor(self.format, (num_rows, stop - start), lines[:, first:last])

    def stored(self) -> "StoredTensor":
        """Return itself, as a `Weight` that is stored as a tensor of its own."""
        return self

    @property
    def lines(self) -> npt.NDArray[np.uint8]:
        """The data by rows, [rows, bytes]."""
        return self.data.reshape(self.shape[0], -1)


class Weight(Protocol):
    """A weight as executors see it, whatever it is made from. Only the last two read numbers."""

    @property
    def format(self) -> Format:
        """Of what `stored` returns: where there is a choice, one that rounds nothing."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def block_numbers(self) -> int:
        """Number of values of a row that cannot be split."""
        ...

    def rows(self, start: int, stop: int) -> Self: ...

    def columns(self, start: int, stop: int) -> Self:
        """Return columns `start` to `stop` of a matrix, whole blocks."""
        ...

    def stored(self) -> StoredTensor:
        """Return it as one tensor."""
        ...

    def to_float32(self) -> npt.NDArray[np.float32]:
        """Return its numbers, of `shape`."""
        ...


Weights = Mapping[str, Weight]
