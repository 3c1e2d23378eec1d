"""Where a file has a weight: rows of a tensor, adjacent or taking turns with those of others."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from headrace.engine_proc.worker.checkpoints.interleaved_rows import (
    InterleavedRows,
    NegatedExponentials,
)
from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, ShortConvSpec


class WeightSource(NamedTuple):
    """The source of a weight: rows of a tensor of the file, from `first_row` on.

    With a `period`, `run` rows of each are the weight's.
    """

    tensor: str
    first_row: int = 0
    run: int = 0
    period: int = 0
    is_logarithm: bool = False  # of rates, without their sign

    def weight_of(self, tensor: Weight, num_rows: int) -> Weight:
        """Return the weight."""
        if self.period:
            return InterleavedRows(tensor, self.first_row, self.run, self.period, 0, num_rows)
        rows = tensor.rows(self.first_row, self.first_row + num_rows)
        return NegatedExponentials(rows) if self.is_logarithm else rows


def interleaved(tensor: str, **runs: int) -> dict[str, WeightSource]:
    """Name the rows of weights that take turns, so many of each."""
    ends = itertools.accumulate(runs.values())
    period = sum(runs.values())
    return {
        name: WeightSource(tensor, end - run, run, period)
        for (name, run), end in zip(runs.items(), ends, strict=True)
    }


def with_biases(linear: Mapping[str, str]) -> dict[str, str]:
    """Name the weight and the bias of each linear layer."""
    weights = {ours: f"{theirs}.weight" for ours, theirs in linear.items()}
    return weights | {f"{ours}.bias": f"{theirs}.bias" for ours, theirs in linear.items()}


def gate_and_up(ours: str, tensor: str, size: int) -> dict[str, WeightSource]:
    """Name the rows of gate, and of up after them."""
    return {f"{ours}gate": WeightSource(tensor), f"{ours}up": WeightSource(tensor, size)}


def short_conv(conv: ShortConvSpec, ours: str, theirs: str) -> dict[str, WeightSource]:
    """Name the weights of a short convolution: its inputs are rows of one matrix."""
    first = {"in_b": 0, "in_c": conv.channels, "in_x": 2 * conv.channels}
    sources = {f"{ours}conv": WeightSource(f"{theirs}conv.weight")}
    sources[f"{ours}conv.bias"] = WeightSource(f"{theirs}conv.bias")
    for bias, suffix in (("", ".weight"), (".bias", ".bias")):
        sources[f"{ours}out{bias}"] = WeightSource(f"{theirs}out_proj{suffix}")
        for name, row in first.items():
            sources[f"{ours}{name}{bias}"] = WeightSource(f"{theirs}in_proj{suffix}", row)
    return sources


def gated_queries(spec: DecoderSpec, layer: str, theirs: str) -> dict[str, WeightSource]:
    """Name the rows of queries and of their gate, which alternate head by head."""
    run = spec.head_dim
    return {
        f"{layer}{ours}{bias}": WeightSource(f"{theirs}{bias or '.weight'}", first, run, 2 * run)
        for bias in ("", ".bias")
        for ours, first in (("q", 0), ("attn_gate", run))
    }


def fused_qkv(spec: DecoderSpec, layer: str, theirs: str) -> dict[str, WeightSource]:
    """Name the rows of queries, keys and values in one matrix, and in one bias."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        f"{layer}{ours}{bias}": WeightSource(f"{theirs}{bias or '.weight'}", first)
        for bias in ("", ".bias")
        for ours, first in (("q", 0), ("k", q), ("v", q + kv))
    }


def fused_gate_up(spec: DecoderSpec, layer: str, theirs: str) -> dict[str, WeightSource]:
    """Name the rows of gate and up in one matrix."""
    return gate_and_up(layer, f"{theirs}.weight", spec.intermediate_size)
