"""A decoder is cut into stages, which compute its logits to the bit."""

import dataclasses
import itertools
import os
from typing import Any

import numpy as np
import pytest
from random_decoders import (
    HYBRIDS,
    LATENTS,
    MIXTURES,
    SPEC,
    SPECS,
    batch,
    cpu,
    random_weights,
)

from headrace.engine_proc.shm.hidden_link import HiddenLink
from headrace.engine_proc.shm.stage_links import StageLinks
from headrace.engine_proc.worker.checkpoints.weights import Format, Weights
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, LayerSpec
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.parallel.shard import shard_spec, shards
from headrace.engine_proc.worker.stages.stage import cut_by_size, moved, stages
from headrace.engine_proc.worker.stages.stage_runner import LastStage, StageRunner
from headrace.errors import ModelError
from headrace.ipc.worker_messages import Step

CUT = {**SPECS, **MIXTURES, **LATENTS}
MAX_ROWS = 64
ROUNDED: dict[str, Any] = {"kv_dtype": "bfloat16", "rounds_activations": True}


class Pipeline:
    """Stages in one process, which run one after the other."""

    def __init__(self, spec: DecoderSpec, weights: Weights, count: int, **options: Any) -> None:
        parts = stages(spec, count)
        fds = [HiddenLink.create() for _ in parts[1:]]
        ends = [[HiddenLink(fd, 2, MAX_ROWS, spec.hidden_size) for fd in fds] for _ in range(2)]
        for fd in fds:
            os.close(fd)
        before, after = [None, *ends[0]], [*ends[1], None]
        self.links = [StageLinks(*pair) for pair in zip(before, after, strict=True)]
        self.executors = [
            cpu(part.spec_of(spec), part.weights_of(spec, weights), **options) for part in parts
        ]

    def forward(self, step: Batch) -> Floats:
        """Return the logits of a step."""
        for executor, links in zip(self.executors[:-1], self.links[:-1], strict=True):
            assert links.begin()
            StageRunner(executor, links).run(message(step))
            links.end(works=True)
        links = self.links[-1]
        assert links.begin()
        logits = LastStage(self.executors[-1], links).logits(step).rows.copy()
        links.end(works=True)
        return logits

    def embed(self, step: Batch) -> Floats:
        """Return what the head sees in a step of two stages."""
        StageRunner(self.executors[0], self.links[0]).run(message(step))
        self.links[0].end(works=True)
        assert self.links[1].begin()
        hidden = LastStage(self.executors[1], self.links[1]).embed(step)
        self.links[1].end(works=True)
        return hidden


def message(step: Batch) -> Step:
    """Return a batch as the engine sends it; the table has rows only up to the last sequence."""
    columns = (step.token_ids, step.positions, step.sequences, step.page_table, step.logit_rows)
    ids, positions, sequences, table, rows = (np.ascontiguousarray(c).tobytes() for c in columns)
    table = np.ascontiguousarray(step.page_table[: int(step.sequences[-1]) + 1]).tobytes()
    return Step(
        token_ids=ids,
        positions=positions,
        sequences=sequences,
        page_table=table,
        logit_rows=rows,
        rows=b"",
    )


@pytest.mark.parametrize("name", CUT)
def test_logits_are_to_the_bit_those_without_stages(name: str) -> None:
    spec = CUT[name]
    weights = random_weights(spec, Format.BF16)
    pipeline, whole = Pipeline(spec, weights, 2, **ROUNDED), cpu(spec, weights, **ROUNDED)
    for parts in ([(0, 0, 40)], [(0, 40, 41), (1, 0, 20)], [(0, 41, 42), (1, 20, 23)]):
        step = batch(parts)
        np.testing.assert_array_equal(pipeline.forward(step), whole.forward(step))


def test_vectors_are_those_without_stages() -> None:
    weights = random_weights(SPEC)
    step = batch([(0, 0, 30)])
    vectors = Pipeline(SPEC, weights, 2).embed(step)
    np.testing.assert_array_equal(vectors, cpu(SPEC, weights).embed(step))


def test_each_layer_may_be_a_stage() -> None:
    spec = dataclasses.replace(SPEC, layers=(LayerSpec(),) * 4, tied_head=False)
    weights = random_weights(spec)
    pipeline, whole = Pipeline(spec, weights, 4), cpu(spec, weights)
    step = batch([(0, 0, 30)])
    np.testing.assert_array_equal(pipeline.forward(step), whole.forward(step))


@pytest.mark.parametrize("tied_head", [True, False])
def test_each_weight_is_in_one_stage_but_a_tied_embedding(tied_head: bool) -> None:
    spec = dataclasses.replace(SPEC, layers=(LayerSpec(),) * 7, tied_head=tied_head)
    parts = stages(spec, 3)
    found = [moved(n, p.layers.start) for p in parts for n in weight_shapes(p.spec_of(spec))]
    expected = [*weight_shapes(spec), *(["embed"] if tied_head else [])]
    assert sorted(found) == sorted(expected)
    assert [part.layers for part in parts] == [
        range(a, b) for a, b in itertools.pairwise([0, *(p.layers.stop for p in parts)])
    ]


@pytest.mark.parametrize(
    ("sizes", "count", "ends"),
    [
        ([1, 1, 1, 1], 2, [2, 4]),
        ([1, 1, 1, 3], 2, [3, 4]),  # the head counts with the last layer
        ([1, 1, 1, 9], 3, [2, 3, 4]),
        ([9, 1, 1, 1], 4, [1, 2, 3, 4]),
        ([2] * 10, 3, [3, 7, 10]),
    ],
)
def test_stages_are_about_as_large(sizes: list[int], count: int, ends: list[int]) -> None:
    assert cut_by_size(sizes, count) == ends


@pytest.mark.parametrize("name", [*MIXTURES, "gemma"])
def test_a_shard_of_a_stage_is_the_stage_of_a_shard(name: str) -> None:
    spec = with_uneven_layers(CUT[name])
    weights = random_weights(spec)
    for part, shard in itertools.product(stages(spec, 2), shards(spec, weights, 2)):
        ours = shard_spec(part.spec_of(spec), part.shard_of(shard))
        assert ours == part.spec_of(shard_spec(spec, shard))


def with_uneven_layers(spec: DecoderSpec) -> DecoderSpec:
    """Return a decoder whose last layer has a wider MLP, unless that is a mixture."""
    *others, last = spec.layers
    if last.mixture is None:
        last = dataclasses.replace(last, intermediate_size=2 * spec.intermediate_size)
    return dataclasses.replace(spec, layers=(*others, last))


@pytest.mark.parametrize(
    ("spec", "count", "why"),
    [
        (SPEC, 3, "--pp 3: the model has 2 layers, and a stage has one at least"),
        (next(iter(HYBRIDS.values())), 2, "--pp 2: models with states have no stages"),
        (
            dataclasses.replace(SPEC, layers=(LayerSpec(), LayerSpec(keys_of=0))),
            2,
            "--pp 2: layers of this model read the keys of others",
        ),
    ],
)
def test_what_has_no_stages_is_refused(spec: DecoderSpec, count: int, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        stages(spec, count)
