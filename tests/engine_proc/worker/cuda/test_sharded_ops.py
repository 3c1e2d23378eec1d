"""GPU workers that share a model give the results of one that has it all. They are threads here."""

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import family_table
import numpy as np
import pytest
import torch
from gpu_tests import first_of
from random_decoders import (
    DELTA_NET,
    GEMMA_SPECS,
    MAMBA,
    MAMBA2,
    NUM_PAGES,
    NUM_STATES,
    SPEC,
    SPECS,
    batch,
    random_weights,
    with_images,
    with_latents,
    with_mixture,
    with_states,
)

from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.kernels.norm import square_sums
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    PerLayerSpec,
    RouterScore,
    ShortConvSpec,
)
from headrace.engine_proc.worker.parallel.peers import Peers
from headrace.engine_proc.worker.parallel.shard import shards

T = TypeVar("T")
SIZES: dict[str, Any] = {
    "vocab_size": 111,  # 56 and 55
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 3,
    "head_dim": 16,
}
MIXTURE = with_mixture(
    num_experts=3,
    experts_per_token=2,
    intermediate_size=16,
    shared_intermediate_size=48,
    shared_gate=True,
)
BIASED = with_mixture(
    MIXTURE,
    num_experts=3,
    experts_per_token=2,
    intermediate_size=16,
    score=RouterScore.SIGMOID,
    selection_bias=True,
    router_bias=True,
    expert_bias=True,
)
DECODERS = {
    # Two heads and one, of one KV head that both have; norms over all of them.
    "olmo": dataclasses.replace(SPECS["olmo"], num_kv_heads=1, layers=(LayerSpec(),), **SIZES),
    "biases": dataclasses.replace(
        SPEC,
        **{**SIZES, "num_kv_heads": 3, "vocab_size": 112},  # as many for each
        layers=(LayerSpec(),),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        attention_sinks=True,
    ),
    # Two heads and one, whose latents both have; experts beside them.
    "latents, mixture": with_latents(
        dataclasses.replace(MIXTURE, layers=MIXTURE.layers[:1], **SIZES),
        LatentAttentionSpec(query_rank=24, rank=16, nope_dim=12, rope_dim=16, value_dim=16),
    ),
}
DECODERS["mamba"] = dataclasses.replace(  # dt, B and C are sums over the workers
    SPEC,
    **SIZES,
    num_kv_heads=3,
    layers=(LayerSpec(mixer=dataclasses.replace(MAMBA, channels=24), has_mlp=False),),
)
NORMS = Mamba2Spec(  # two norms and a half for each
    num_heads=10, head_dim=8, state_size=9, num_groups=5, kernel_size=2, norm_size=16
)
DECODERS["norms of Mamba-2 that are cut, experts without gates, with biases"] = dataclasses.replace(
    SPEC,
    **SIZES,
    num_kv_heads=3,
    activation=Activation.RELU2,
    gated_mlp=False,
    layers=(
        LayerSpec(mixer=NORMS, has_mlp=False),
        LayerSpec(mixer=dataclasses.replace(NORMS, norm_size=80, norm_before_gate=True)),
        dataclasses.replace(BIASED.layers[0], has_mixer=False),
    ),
)
# Gates of both are cut by their common mean, and one has no embeddings per layer of its own.
GEMMA3N = GEMMA_SPECS["gemma3n"]
DECODERS["gemma3n"] = dataclasses.replace(
    GEMMA3N, per_layer=PerLayerSpec(size=16, vocab_size=50), layers=GEMMA3N.layers[:1]
)
if family_table.WRITES:
    DECODERS |= {name: GEMMA_SPECS[name] for name in ("gemma4", "gemma4, experts")}
    DECODERS["states"] = dataclasses.replace(
        SPEC,
        **SIZES,
        num_kv_heads=3,
        attention_gate=True,
        layers=tuple(
            LayerSpec(mixer=mixer, has_mlp=mixer is None)
            for mixer in (
                ShortConvSpec(channels=32, kernel_size=3),
                dataclasses.replace(DELTA_NET, num_key_heads=3, num_value_heads=6),
                dataclasses.replace(MAMBA2, norm_size=0),
                MAMBA2,  # of two norms, and each has one
                None,
            )
        ),
    )


class Turns(ShmAllReduce):
    """A group whose ranks compute in turns: Triton's interpreter is not for several threads."""

    turn = threading.Lock()

    @contextmanager
    def others_turn(self) -> Iterator[None]:
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def all_reduce(self, x: Any) -> Any:
        with self.others_turn():
            return super().all_reduce(x)

    def all_gather(self, x: Any, out: Any) -> None:
        with self.others_turn():
            super().all_gather(x, out)


def on_ranks(num_ranks: int, body: Callable[[ShmAllReduce], T]) -> list[T]:
    """Return what `body` does as each rank."""
    fd = ShmAllReduce.create(num_ranks)
    groups = [Turns(fd, rank, num_ranks) for rank in range(num_ranks)]
    os.close(fd)

    def be(group: ShmAllReduce) -> T:
        with Turns.turn:
            try:
                return body(group)
            except BaseException:
                group.abort()
                raise

    with ThreadPoolExecutor(num_ranks) as pool:
        found = list(pool.map(be, groups))
    for group in groups:
        group.close()
    return found


def step_of(*parts: tuple[int, int, int]) -> Batch:
    return with_states(batch(parts))


def make(spec: DecoderSpec, device: torch.device, group: ShmAllReduce | None) -> CudaExecutor:
    """Return the executor of one worker, or of a rank."""
    weights = random_weights(spec)
    return CudaExecutor(
        spec,
        weights,
        num_pages=NUM_PAGES,
        num_states=NUM_STATES,
        page_tokens=16,
        device=device,
        dtype=torch.float32,
        tiling=Tiling(rows=16, keys=16, split_keys=16, enough_programs=6),
        peers=None if group is None else Peers(shards(spec, weights, 2), group),
    )


def check_team(device: torch.device, run: Callable[[ShmAllReduce | None], list[Floats]]) -> None:
    """Two ranks say the same, which is near what one worker says."""
    if device.type == "cuda":
        pytest.skip("sums of GPUs are the collectives' own tests")
    alone = run(None)
    one, other = on_ranks(2, run)
    for ours, same, expected in zip(one, other, alone, strict=True):
        np.testing.assert_array_equal(ours, same)
        np.testing.assert_allclose(ours, expected, atol=5e-5)
        np.testing.assert_array_equal(ours.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("name", first_of(3, [*reversed(DECODERS)]))
def test_a_team_says_what_one_worker_says(name: str, device: torch.device) -> None:
    spec = DECODERS[name]

    def run(group: ShmAllReduce | None) -> list[Floats]:
        executor = make(spec, device, group)
        first = executor.forward(step_of((0, 0, 4), (1, 0, 2)))
        nothing = dataclasses.replace(step_of((1, 2, 3)), logit_rows=np.empty(0, np.int32))
        assert executor.forward(nothing).shape == (0, spec.vocab_size)
        return [first, executor.forward(step_of((1, 3, 4), (0, 4, 5)))]

    check_team(device, run)


def test_a_team_takes_rows_of_images_once(device: torch.device) -> None:
    """In place of embeddings, of which ranks make a sum, and behind the first layer."""
    spec = dataclasses.replace(SPECS["mrope"], **SIZES, num_kv_heads=3, layers=(LayerSpec(),))
    step = with_images(batch([(0, 4, 8)]), spec, whole=False)
    check_team(device, lambda group: [make(spec, device, group).forward(step)])


def test_squares_are_summed_by_row(device: torch.device) -> None:
    x = torch.randn(3, 90, device=device)[:, 5:75]
    torch.testing.assert_close(square_sums(x), x.square().sum(1))
    assert square_sums(x[:0]).shape == (0,)
