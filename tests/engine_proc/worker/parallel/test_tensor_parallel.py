"""Workers that share a model give the results of one that has it all. Here they are threads."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import gguf_twins
import numpy as np
import pytest
import torch
from decoder_cases import decoder_case
from generation import PROMPTS, Generation
from gguf_mixtures import BUILT_IN
from gguf_twins import tiny_model, write_gguf
from hybrid_models import HYBRIDS as HYBRID_CASES
from hybrid_models import tiny_hybrid
from latent_models import LATENT as LATENT_CASES
from mixture_models import tiny_mixture
from random_decoders import (
    BLOCKS,
    HYBRIDS,
    LATENTS,
    MIXTURES,
    NUM_STATES,
    SPEC,
    SPECS,
    WHOLE_BLOCKS,
    batch,
    cpu,
    random_weights,
    stored,
    with_images,
    with_mixture,
    with_states,
)
from worker_teams import Team

from headrace.engine_proc.collectives.collectives import CollectiveFailed, CollectiveOutcome
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weights
from headrace.engine_proc.worker.execution.cache_sizes import page_bytes
from headrace.engine_proc.worker.execution.cpu_executor import KVDtype
from headrace.engine_proc.worker.models import gguf_architectures
from headrace.engine_proc.worker.models.lowering import FAMILIES
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    ShortConvSpec,
)
from headrace.engine_proc.worker.parallel.shard import (
    INNER_UNIT,
    CannotCut,
    Shard,
    shard_weights,
    shards,
)

T = TypeVar("T")
PROMPT = [(0, 0, 60)]
UNEVEN = {  # nine query heads and three KV heads, for up to nine workers
    name: dataclasses.replace(spec, num_heads=9, num_kv_heads=3) for name, spec in SPECS.items()
}
UNEVEN_MIXTURES = {
    name: dataclasses.replace(spec, num_heads=9, num_kv_heads=3) for name, spec in MIXTURES.items()
}
# One of each mixer, and what is no family of its own: test_family_table.py has all families.
MIXERS = ("lfm2", "qwen3_next", "kimi_linear", "bamba", "falcon_h1", "deepseek_v3")
CASES = [case for case in (*HYBRID_CASES, *LATENT_CASES) if case in MIXERS or case not in FAMILIES]


@pytest.fixture
def team_of() -> Iterator[Callable[..., Team]]:
    """Makes teams, and ends them."""
    teams: list[Team] = []

    def make(*args: Any, **options: Any) -> Team:
        teams.append(Team(*args, **options))
        return teams[-1]

    yield make
    for shard_group in teams:
        shard_group.close()


TeamOf = Callable[..., Team]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", UNEVEN_MIXTURES)
def test_workers_share_the_experts_of_a_mixture(name: str, num_ranks: int, team_of: TeamOf) -> None:
    spec = UNEVEN_MIXTURES[name]
    weights = random_weights(spec)
    team, alone = team_of(spec, weights, num_ranks), cpu(spec, weights)
    whole = alone.forward(batch([(0, 0, 61)]))
    prompt = team.forward(batch(PROMPT))
    np.testing.assert_allclose(prompt, whole[:60], atol=5e-5)
    # One token: its experts are all on one worker, or none is on some.
    one = team.forward(batch([(0, 60, 61)]))
    np.testing.assert_allclose(one, whole[60:], atol=5e-5)
    again = team.forward(batch([(1, 0, 40), (0, 0, 33), (2, 0, 1)]))
    np.testing.assert_array_equal(again[40:73], prompt[:33])


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", HYBRIDS)
def test_workers_share_the_channels_of_a_hybrid(name: str, num_ranks: int, team_of: TeamOf) -> None:
    spec = HYBRIDS[name]
    spec = dataclasses.replace(spec, num_heads=9, num_kv_heads=3)
    weights = random_weights(spec)
    team = team_of(spec, weights, num_ranks, num_states=NUM_STATES)
    alone = cpu(spec, weights, num_states=NUM_STATES)
    if num_ranks == 2:  # groups of Mamba-2 may be on several workers
        assert sum(e.spec.state_numbers for e in team.executors) <= 1.2 * spec.state_numbers
    for parts in ([(0, 0, 60)], [(1, 0, 3), (0, 60, 61)], [(0, 61, 90), (1, 3, 4)]):
        step = with_states(batch(parts))
        np.testing.assert_allclose(team.forward(step), alone.forward(step), atol=5e-5)


@pytest.mark.parametrize("case", CASES)
def test_two_workers_generate_a_text_from_checkpoints(case: str, team_of: TeamOf) -> None:
    made = decoder_case(case)
    generation = Generation(partial(team_of, made.ours.spec, made.ours.weights, 2), budget=20)
    assert generation.answers(PROMPTS) == made.answers
    assert generation.answers(PROMPTS) == made.answers, "from checkpoints, or cached pages"


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", LATENTS)
def test_workers_share_the_heads_of_latents(name: str, num_ranks: int, team_of: TeamOf) -> None:
    """Every worker has the latents of all tokens."""
    spec = LATENTS[name]
    weights = random_weights(spec)
    team, alone = team_of(spec, weights, num_ranks), cpu(spec, weights)
    assert sum(e.spec.num_heads for e in team.executors) == spec.num_heads
    for e in team.executors:
        assert page_bytes(e.spec, 16, KVDtype.FLOAT32) == page_bytes(spec, 16, KVDtype.FLOAT32)
    for parts in ([(0, 0, 60)], [(1, 0, 3), (0, 60, 61)], [(0, 61, 90), (1, 3, 4)]):
        step = batch(parts)
        np.testing.assert_allclose(team.forward(step), alone.forward(step), atol=5e-5)


def test_blocks_of_convolutions_stay_whole(team_of: TeamOf) -> None:
    conv = LayerSpec(mixer=ShortConvSpec(channels=512, kernel_size=3))
    spec = dataclasses.replace(
        WHOLE_BLOCKS, intermediate_size=1024, num_heads=32, layers=(conv, LayerSpec())
    )
    weights = random_weights(spec, Format.Q4_K)
    team = team_of(spec, weights, 2, num_states=NUM_STATES)
    alone = cpu(spec, weights, num_states=NUM_STATES)
    step = with_states(batch([(0, 0, 40)]))
    np.testing.assert_allclose(team.forward(step), alone.forward(step), atol=5e-5)
    with pytest.raises(CannotCut, match=r"channels.*it can be 1, 2$"):
        shards(spec, weights, 3)


def test_delta_nets_that_cannot_be_cut_are_refused() -> None:
    delta = GatedDeltaNetSpec(
        num_key_heads=4, num_value_heads=4, key_dim=16, value_dim=128, kernel_size=4
    )
    layers = (LayerSpec(mixer=delta), LayerSpec())
    spec = dataclasses.replace(WHOLE_BLOCKS, intermediate_size=1024, num_heads=64, layers=layers)
    with pytest.raises(CannotCut, match=r"128 values .* be cut from 256 .* be 1, 2$"):
        shards(spec, random_weights(spec, Format.Q4_K), 4)
    with pytest.raises(CannotCut, match="have 4 key heads"):
        shards(spec, random_weights(spec), 5)


@pytest.mark.parametrize("expert", [0, 11])
def test_one_worker_may_have_the_only_expert(expert: int, team_of: TeamOf) -> None:
    """All tokens choose it, so the other workers have no rows; of any number of tokens."""
    spec = with_mixture(experts_per_token=1, router_bias=True, expert_bias=True)
    weights = dict(random_weights(spec))
    bias = np.where(np.arange(12) == expert, 1000, 0).astype(np.float32)
    weights |= {f"layers.{layer}.router.bias": stored(bias) for layer in range(len(spec.layers))}
    team, alone = team_of(spec, weights, 3), cpu(spec, weights)
    for parts in ([(0, 0, 1)], [(0, 1, 3), (1, 0, 1)], [(1, 1, 250)]):
        logits = alone.forward(batch(parts))
        np.testing.assert_allclose(team.forward(batch(parts)), logits, atol=5e-5)


@pytest.mark.parametrize("format", [Format.BF16, Format.Q8_0, Format.MXFP4, Format.Q4_K])
def test_workers_share_packed_experts(format: Format, team_of: TeamOf) -> None:
    """K-quants leave too few blocks in a row of an expert to cut it, so experts are shared."""
    wide = BLOCKS.get(format, (0,))[0] == 256
    spec = dataclasses.replace(
        SPEC,
        hidden_size=256 if wide else 96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128 if wide else 32,
    )
    size = 256 if wide else 96
    spec = with_mixture(spec, intermediate_size=size, shared_intermediate_size=size)
    weights = random_weights(spec, format)
    step = batch(PROMPT)
    logits = cpu(spec, weights).forward(step)
    np.testing.assert_allclose(team_of(spec, weights, 2).forward(step), logits, atol=5e-5)


def test_more_workers_than_experts_are_refused() -> None:
    spec = with_mixture(num_experts=4)
    with pytest.raises(CannotCut, match="the model has 4 experts; it can be 1, 2, 3, 4"):
        shards(spec, random_weights(spec), 5)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", UNEVEN)
def test_a_team_says_what_one_worker_says(name: str, num_ranks: int, team_of: TeamOf) -> None:
    spec = UNEVEN[name]
    weights = random_weights(spec)
    shard_group, alone = team_of(spec, weights, num_ranks), cpu(spec, weights)
    for step in (batch(PROMPT), batch([(0, 60, 61), (1, 0, 40)])):
        logits = alone.forward(step)
        np.testing.assert_allclose(shard_group.forward(step), logits, atol=5e-5)
        starts = np.arange(0, spec.vocab_size, 64)
        largest = np.maximum.reduceat(shard_group.forward(step), starts, axis=1)
        np.testing.assert_array_equal(shard_group.maxima(step), largest)
    hidden = shard_group.run(lambda executor: executor.embed(batch(PROMPT)))
    np.testing.assert_allclose(hidden, alone.embed(batch(PROMPT)), atol=5e-5)


@pytest.mark.parametrize("name", ["gemma", "mrope"])
def test_a_team_takes_images_as_one_worker_does(name: str, team_of: TeamOf) -> None:
    spec = UNEVEN[name]
    weights = random_weights(spec)
    step = with_images(batch([(1, 0, 75), (0, 0, 30)]), spec)
    expected = cpu(spec, weights).forward(step)
    np.testing.assert_allclose(team_of(spec, weights, 3).forward(step), expected, atol=5e-5)


@pytest.mark.parametrize("name", ["gemma", "olmo", "cohere"])  # each other sums
def test_no_cut_of_the_work_changes_a_bit(name: str, team_of: TeamOf) -> None:
    spec = UNEVEN[name]
    weights = random_weights(spec)
    whole = team_of(spec, weights, 2).forward(batch(PROMPT))
    shard_group = team_of(spec, weights, 2, threads=2)
    parts = [
        shard_group.forward(batch([(0, a, b)])) for a, b in [(0, 1), (1, 9), (9, 41), (41, 60)]
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    "format", [Format.BF16, *(kind for kind in BLOCKS if BLOCKS[kind][0] == 32)]
)
def test_blocks_of_32_are_shared(format: Format, team_of: TeamOf) -> None:
    spec = dataclasses.replace(SPEC, num_heads=12, num_kv_heads=6, intermediate_size=224)
    weights = random_weights(spec, format)
    logits = team_of(spec, weights, 3).forward(batch(PROMPT))
    np.testing.assert_allclose(logits, cpu(spec, weights).forward(batch(PROMPT)), atol=2e-4)


@pytest.mark.parametrize("format", [kind for kind in BLOCKS if BLOCKS[kind][0] == 256])
def test_blocks_of_256_are_shared(format: Format, team_of: TeamOf) -> None:
    spec = dataclasses.replace(WHOLE_BLOCKS, hidden_size=512, num_heads=32, intermediate_size=768)
    weights = random_weights(spec, format)
    logits = team_of(spec, weights, 2).forward(batch(PROMPT))
    np.testing.assert_allclose(logits, cpu(spec, weights).forward(batch(PROMPT)), atol=2e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"weight_dtype": "int8"},
        {"weight_dtype": "int8_weight_only"},
        {"weight_dtype": "bfloat16", "kv_dtype": "bfloat16", "rounds_activations": True},
    ],
    ids=lambda options: options["weight_dtype"],
)
def test_rounding_is_that_of_one_worker(options: dict[str, Any], team_of: TeamOf) -> None:
    """Groups of 32 are cut nowhere, so the same numbers are rounded in the same way."""
    spec = dataclasses.replace(SPEC, num_heads=8, num_kv_heads=4, intermediate_size=5 * INNER_UNIT)
    weights = random_weights(spec)
    logits = team_of(spec, weights, 2, **options).forward(batch(PROMPT))
    alone = cpu(spec, weights, **options).forward(batch(PROMPT))
    exact = cpu(spec, weights).forward(batch(PROMPT))
    rounding = np.linalg.norm(alone - exact)
    assert np.linalg.norm(logits - alone) < 0.5 * rounding < 0.05 * np.linalg.norm(exact)


GGUF_FAMILIES = (
    "llama", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "granite",
    "granite_swa", "olmo2", "smollm3", "glm4", "ernie4_5", "exaone4", "cohere", "cohere2",
    "seed_oss", "hunyuan_v1_dense", "stablelm", "starcoder2", "nemotron", "arcee", "gpt_neox",
    "phi", "apertus",
)  # fmt: skip
GGUF_MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoeshared", "gpt_oss", "ernie4_5_moe",
    "glm4_moe", "dots1", "hunyuan_v1_moe", "phimoe", "llama4_text", "minimax_m2",
)  # fmt: skip
GGUF_HYBRIDS = (
    "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "granitemoehybrid", "nemotron_h", "falcon_h1", "jamba",
)  # fmt: skip


def test_every_architecture_of_ggufs_is_shared() -> None:
    dense = of_files(GGUF_FAMILIES)
    known = set(gguf_architectures.ARCHITECTURES) | set(gguf_architectures.MIXTURES)
    # "qwen2vl" has the tensors of qwen2, "nemotron_h_moe" those of nemotron_h and of a mixture.
    # Others are cut as folders are, which test_family_table.py has.
    as_folders = {"deepseek2", "kimi-linear", "gemma3n", "gemma4"}
    others = of_files(GGUF_HYBRIDS) | {"qwen2vl", "nemotron_h_moe"} | as_folders
    assert dense | of_files(GGUF_MIXTURES) | others == known


def of_files(families: Iterable[str]) -> set[str]:
    """Return what files call some families."""
    return {gguf_twins.ARCHITECTURES.get(family, family) for family in families}


@pytest.mark.parametrize("model_type", [*GGUF_FAMILIES, *GGUF_MIXTURES, *GGUF_HYBRIDS])
def test_tensors_of_a_gguf_are_shared(model_type: str, tmp_path: Path, team_of: TeamOf) -> None:
    if model_type in GGUF_MIXTURES:
        model = tiny_mixture(model_type, **BUILT_IN.get(model_type, {}))
    elif model_type in GGUF_HYBRIDS:
        model = tiny_hybrid(model_type)
    else:
        head_dim = 16 if model_type == "hunyuan_v1_dense" else None  # it needs one
        model = tiny_model(model_type, head_dim=head_dim)
    file = open_model(write_gguf(tmp_path / "tiny.gguf", model, fuse_qkv=model_type == "llama"))
    step = with_states(batch([(0, 0, 20)]))
    step = dataclasses.replace(step, token_ids=step.token_ids % 96)
    logits = team_of(file.spec, file.weights, 2, num_states=NUM_STATES).forward(step)
    with torch.inference_mode():
        expected = model(torch.tensor(step.token_ids, dtype=torch.long)[None]).logits[0]
    atol = 1e-4 if model_type in GGUF_HYBRIDS else 5e-5  # transformers takes 64 tokens at once
    np.testing.assert_allclose(logits, expected.numpy(), atol=atol)


@pytest.mark.parametrize("name", ["biases, odd sizes", "olmo"])
def test_a_worker_reads_nothing_but_its_share(name: str, team_of: TeamOf) -> None:
    spec = UNEVEN[name]
    weights = random_weights(spec)
    logits = team_of(spec, weights, 2).forward(batch(PROMPT))
    poisoned = team_of(spec, weights, 2, read=lambda shard: only(spec, weights, shard))
    np.testing.assert_array_equal(poisoned.forward(batch(PROMPT)), logits)


def only(spec: DecoderSpec, weights: Weights, shard: Shard) -> Weights:
    """Return a copy of the weights in which all that is not in a share is NaN."""
    copies = {}
    for name, tensor in weights.items():
        nans = np.full(tensor.shape, np.nan, np.float32)
        copies[name] = StoredTensor(Format.F32, tensor.shape, nans.reshape(-1).view(np.uint8))
    shares = shard_weights(spec, weights, shard)
    for name, own in shard_weights(spec, copies, shard).items():
        if np.shares_memory(own.data, copies[name].data):  # zeros in place of a bias do not
            own.data[:] = shares[name].data.reshape(own.data.shape)
    return copies


def test_what_is_cut_is_read_once_by_all_together() -> None:
    spec = dataclasses.replace(SPEC, intermediate_size=3 * INNER_UNIT)
    weights = random_weights(spec)
    matrices = [name for name, tensor in weights.items() if len(tensor.shape) == 2]
    found = [shard_weights(spec, weights, shard) for shard in shards(spec, weights, 2)]
    for name in matrices:
        sizes = [own[name].data.size for own in found]
        assert sum(sizes) == weights[name].data.size
        assert max(sizes) <= 2 / 3 * sum(sizes)  # an MLP of three units


def test_wait_for_a_lost_worker_names_it(team_of: TeamOf) -> None:
    shard_group = team_of(SPEC, random_weights(SPEC), 2)
    shard_group.groups[1].abort(CollectiveOutcome.PEER_DIED)
    with pytest.raises(CollectiveFailed, match="rank 1 died"):
        shard_group.executors[0].forward(batch(PROMPT))
    with pytest.raises(CollectiveFailed, match="rank 1 died"):  # and it does so again
        shard_group.executors[0].forward(batch(PROMPT))


def test_a_batch_out_of_range_is_refused_by_all(team_of: TeamOf) -> None:
    shard_group = team_of(SPEC, random_weights(SPEC), 2)
    bad = dataclasses.replace(batch(PROMPT), token_ids=np.full(60, SPEC.vocab_size, np.int32))
    for executor in shard_group.executors:
        with pytest.raises(ValueError, match="beyond its range"):
            executor.forward(bad)
    last = dataclasses.replace(batch(PROMPT), token_ids=np.full(60, SPEC.vocab_size - 1, np.int32))
    alone = cpu(SPEC).forward(last)
    np.testing.assert_allclose(shard_group.forward(last), alone, atol=5e-5)


def test_many_rows_of_logits_are_gathered_in_parts(team_of: TeamOf) -> None:
    step = batch([(0, 0, 150)])
    some = dataclasses.replace(step, logit_rows=np.arange(3, 150, 2, dtype=np.int32))
    logits = team_of(SPEC, random_weights(SPEC), 3).forward(some)
    np.testing.assert_allclose(logits, cpu(SPEC).forward(step)[3:150:2], atol=5e-5)
