"""Adapters in kernels give the logits of the C++ core, in any mix, captured or not."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from gpu_tests import first_of
from random_adapters import random_adapter
from random_decoders import MAMBA, NUM_PAGES, SPEC, SPECS, batch, cpu, random_weights
from recorded_graphs import RecordedGraphs, device_tensors

from headrace.engine_proc.worker.adapters.adapter_opener import AdaptedModel
from headrace.engine_proc.worker.adapters.factors import AdapterRefused
from headrace.engine_proc.worker.adapters.low_rank import LowRank, LowRanks
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes
from headrace.engine_proc.worker.cuda.graphs import CudaGraphs
from headrace.engine_proc.worker.cuda.matrices.adapted import AdapterRoom
from headrace.engine_proc.worker.cuda.matrices.cuda_adapters import CudaAdapters
from headrace.engine_proc.worker.execution.cpu_adapters import PackedAdapter
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    Mixer,
)

SIZES = {"num_heads": 2, "num_kv_heads": 1, "hidden_size": 32, "intermediate_size": 40}
TINY = dataclasses.replace(SPEC, layers=(LayerSpec(),), tied_head=False, **SIZES)
DECODERS = {
    "llama": TINY,
    "biases": dataclasses.replace(
        SPECS["biases, odd sizes"], num_heads=2, num_kv_heads=1, layers=(LayerSpec(),)
    ),
    "gemma": dataclasses.replace(SPECS["gemma"], **SIZES, layers=SPECS["gemma"].layers[:2]),
}
STEPS = ([(0, 0, 9), (2, 0, 3), (1, 0, 4)], [(2, 3, 4), (0, 9, 14), (1, 4, 5)])


class Pair:
    """A decoder in kernels and in the core, with the same adapters."""

    def __init__(self, spec: DecoderSpec, device: torch.device) -> None:
        weights = random_weights(spec)
        self.ours = CudaExecutor(
            spec,
            weights,
            num_pages=NUM_PAGES,
            page_tokens=16,
            device=device,
            dtype=torch.float32,
            tiling=Tiling(rows=16, keys=16, split_keys=16, enough_programs=6),
            largest=Sizes(64, 4, 16),
            max_model_len=304,
            adapters=AdapterRoom(num_slots=3, max_rank=6),
        )
        self.theirs = cpu(spec)
        self._slots = CudaAdapters(
            self.ours.adapter_parts, AdaptedModel(spec, weights, is_gguf=False, max_rank=6)
        )

    def install(self, slot: int, low_ranks: LowRanks) -> None:
        self._slots.install(slot, self._slots.send(low_ranks))
        PackedAdapter(self.theirs, low_ranks, Format.F32).install(self.theirs, slot)

    def compare(self, slots: list[int]) -> None:
        column = np.array(slots, np.int32)
        for parts in STEPS:
            step = dataclasses.replace(batch(parts), adapters=column)
            np.testing.assert_allclose(
                self.ours.forward(step), self.theirs.forward(step), atol=1e-3, rtol=1e-3
            )


@pytest.mark.parametrize("name", first_of(1, ["biases", "gemma", "llama"]))
def test_logits_with_adapters_are_those_of_the_core(name: str, device: torch.device) -> None:
    spec = DECODERS[name]
    pair = Pair(spec, device)
    names = [own for own in random_adapter(spec, 0, rank=1) if own != "embed"]
    pair.install(0, random_adapter(spec, 1, rank=6, names=names, gain=True))
    pair.install(2, random_adapter(spec, 2, rank=2, names=names))
    pair.compare([2, -1, 0, -1])
    pair.compare([-1, -1, -1, -1])
    pair.install(0, random_adapter(spec, 3, rank=1, names=names[:2]))  # nothing is left behind
    pair.compare([0, 2, 0, -1])


def test_a_captured_step_serves_any_mix(device: torch.device) -> None:
    pair = Pair(TINY, device)
    pair.install(0, random_adapter(TINY, 1, rank=6))
    stand_in = partial(RecordedGraphs, list(device_tensors(pair.ours)))
    open_maker = stand_in if device.type == "cpu" else CudaGraphs
    pair.ours.capture(Buckets([Sizes(10, 4, 10), Sizes(16, 4, 16)]), open_maker)
    pair.compare([0, -1, 0, -1])
    pair.install(1, random_adapter(TINY, 2, rank=3))  # after the capture
    pair.compare([1, 0, -1, -1])
    pair.compare([-1, -1, -1, -1])


def test_rows_of_an_adapter_have_the_bits_they_have_alone(device: torch.device) -> None:
    pair = Pair(TINY, device)
    for slot in range(3):
        pair.install(slot, random_adapter(TINY, slot, rank=6))

    def run(parts: list[tuple[int, int, int]], slots: list[int]) -> Batch:
        return dataclasses.replace(batch(parts), adapters=np.array(slots, np.int32))

    alone = pair.ours.forward(run([(1, 0, 5)], [-1, 2, -1, -1]))
    mixed = pair.ours.forward(run([(0, 0, 4), (1, 0, 5), (2, 0, 3)], [0, 2, 1, -1]))
    np.testing.assert_array_equal(mixed[4:9], alone)


DELTA_NET = GatedDeltaNetSpec(
    num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16, kernel_size=4
)


@pytest.mark.parametrize(
    ("mixer", "names"),
    [(MAMBA, ["in_dt", "in_b", "in_c", "dt"]), (DELTA_NET, ["delta.a", "delta.b"])],
)
def test_products_in_fp32_of_a_mixer_are_refused(
    mixer: Mixer, names: list[str], device: torch.device
) -> None:
    pair = Pair(dataclasses.replace(TINY, layers=(LayerSpec(mixer=mixer),)), device)
    others = random_adapter(pair.ours.spec, 1, rank=2)
    for name in (f"layers.0.{name}" for name in names):
        own = {name: others.pop(name)}
        with pytest.raises(AdapterRefused, match=f"has factors for {name}, which adapters cannot"):
            pair.install(0, own)
    pair.install(0, others)


def test_what_gpus_cannot_change_is_refused(device: torch.device) -> None:
    pair = Pair(TINY, device)
    embed = random_adapter(TINY, 1, rank=2, names=["embed"])
    with pytest.raises(AdapterRefused, match="has factors for embed, which adapters cannot have"):
        pair.install(0, embed)
    whole = {"head": LowRank(None, embed["embed"].b, 1.0)}
    with pytest.raises(AdapterRefused, match="has a whole head, which adapters cannot have"):
        pair.install(0, whole)
