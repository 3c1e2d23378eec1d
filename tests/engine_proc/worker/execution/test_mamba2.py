"""Mamba-2 on the CPU: any format of weights, and what is refused. Bits: test_short_conv.py."""

import dataclasses

import numpy as np
import pytest
from random_decoders import (
    BLOCKS,
    MAMBA2,
    NUM_STATES,
    SPEC,
    WHOLE_BLOCKS,
    batch,
    cpu,
    random_weights,
    with_states,
)

from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cache_sizes import page_bytes, state_bytes
from headrace.engine_proc.worker.execution.cpu_executor import KVDtype, UnsupportedSpec
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, LayerSpec
from headrace.engine_proc.worker.parallel.shard import CannotCut, shards

WIDE = dataclasses.replace(MAMBA2, num_heads=8, head_dim=64, num_groups=1, norm_size=512)


def of_mamba2(spec: DecoderSpec, **fields: object) -> DecoderSpec:
    layer = LayerSpec(mixer=dataclasses.replace(WIDE, **fields))
    return dataclasses.replace(spec, layers=(layer, LayerSpec()))


@pytest.mark.parametrize("format", [Format.BF16, *BLOCKS])
def test_packed_projections_have_the_bits_of_decoded_ones(format: Format) -> None:
    spec = of_mamba2(WHOLE_BLOCKS)
    weights = random_weights(spec, format)
    packed = cpu(spec, weights, num_states=NUM_STATES)
    decoded = cpu(spec, weights, num_states=NUM_STATES, weight_dtype="float32")
    for parts in ([(0, 0, 50)], [(0, 50, 51), (1, 0, 3)]):
        step = with_states(batch(parts))
        np.testing.assert_array_equal(packed.forward(step), decoded.forward(step))


def test_a_mamba2_state_is_a_window_and_matrices() -> None:
    spec = of_mamba2(SPEC)
    assert state_bytes(spec) == 4 * (3 * (512 + 2 * 24) + 8 * 24 * 64)
    attention = dataclasses.replace(spec, layers=(LayerSpec(),))
    assert page_bytes(spec, 32, KVDtype.BFLOAT16) == page_bytes(attention, 32, KVDtype.BFLOAT16)


@pytest.mark.parametrize("kernel_size", [1, 17])
def test_mamba2_kernels_of_other_sizes_are_refused(kernel_size: int) -> None:
    with pytest.raises(UnsupportedSpec, match=f"over {kernel_size} tokens"):
        cpu(of_mamba2(SPEC, kernel_size=kernel_size), num_states=1)


def test_heads_of_mamba2_are_cut_at_quantized_blocks() -> None:
    """A block of 256 is four heads of 64, so eight heads have two shares."""
    spec = of_mamba2(dataclasses.replace(WHOLE_BLOCKS, intermediate_size=1024, num_heads=32))
    weights = random_weights(spec, Format.Q4_K)
    assert [shard.mamba2_heads[0] for shard in shards(spec, weights, 2)] == [range(4), range(4, 8)]
    with pytest.raises(CannotCut, match=r"no heads of Mamba-2 for some; it can be 1, 2$"):
        shards(spec, weights, 3)
