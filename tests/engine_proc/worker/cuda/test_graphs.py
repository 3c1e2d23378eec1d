"""A step in a graph is the step without it, bit for bit, whatever it is padded to."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from random_decoders import NUM_PAGES, SPEC, SPECS, batch, random_weights, with_images
from recorded_graphs import NotCapturable, RecordedGraph, RecordedGraphs, device_tensors
from reference_sampler import make_rows
from torch import Tensor

from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes
from headrace.engine_proc.worker.cuda.graphs import CudaGraphs, capture_all
from headrace.engine_proc.worker.cuda.row_draws import DrawSize, has_limits
from headrace.engine_proc.worker.execution.cpu_sampler import ROW
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, LayerSpec, QKNorm
from headrace.engine_proc.worker.parallel.graph_inputs import Recapture

TINY = dataclasses.replace(
    SPEC,
    num_heads=2,
    num_kv_heads=1,
    hidden_size=32,
    intermediate_size=40,
    layers=(LayerSpec(window=40),),
    qk_norm=QKNorm.PER_HEAD,
    attention_sinks=True,
    logit_softcap=3.0,
    logit_multiplier=0.5,
)
SIZES = [(4, 4, 4), (10, 2, 10), (24, 3, 3)]
REPLAYS = 1000


def make(spec: DecoderSpec, device: torch.device) -> CudaExecutor:
    return CudaExecutor(
        spec,
        random_weights(spec),
        num_pages=NUM_PAGES,
        page_tokens=16,
        device=device,
        dtype=torch.float32,
        # Few programs share a tile's splits, and how many depends on the tiles.
        tiling=Tiling(rows=16, keys=16, split_keys=16, enough_programs=12),
        largest=Sizes(64, 4, 10),
        max_model_len=304,
    )


def capture(executor: CudaExecutor, sizes: Sequence[tuple[int, int, int]] = SIZES) -> None:
    """Capture graphs, on a GPU or its stand-in."""
    stand_in = partial(RecordedGraphs, list(device_tensors(executor)))
    open_maker = stand_in if executor.device.type == "cpu" else CudaGraphs
    executor.capture(Buckets(Sizes(*each) for each in sizes), open_maker)


def last_rows(step: Batch) -> Batch:
    """Want the logits of each sequence's last token."""
    ends = np.flatnonzero(np.diff(step.sequences, append=-1))
    return dataclasses.replace(step, logit_rows=ends.astype(np.int32))


PROMPTS = last_rows(batch([(0, 0, 17), (2, 0, 3), (1, 0, 2)]))  # in 24 tokens
STEPS = {
    "pieces of prompts": PROMPTS,
    "decodes": batch([(2, 3, 4), (0, 17, 18), (1, 2, 3)]),  # in 4
    "guesses": batch([(0, 18, 22), (2, 4, 8)]),  # in 10
    "one alone": batch([(1, 3, 4)]),  # in 4
    "no rows": dataclasses.replace(batch([(2, 8, 20)]), logit_rows=np.empty(0, np.int32)),
    "too large": last_rows(batch([(3, 0, 26)])),  # in none
    "shuffled": batch([(1, 4, 5), (3, 26, 27), (0, 22, 23)]),
}


def test_a_graph_is_the_step_bit_for_bit(device: torch.device) -> None:
    graphs, eager = make(TINY, device), make(TINY, device)
    capture(graphs)
    assert not any(group.any() for group in graphs.kv.groups)  # capturing has left nothing
    for name, step in STEPS.items():
        np.testing.assert_array_equal(graphs.forward(step), eager.forward(step), name)
        # Neither has padding: all other pages are as they were, page 0 among them.
        assert torch.equal(graphs.kv.groups[0], eager.kv.groups[0]), name


def test_tokens_after_an_image_have_graphs(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Their positions have three parts. Rows of images themselves come in without a graph."""
    sizes = {"num_heads": 2, "num_kv_heads": 1, "hidden_size": 32, "intermediate_size": 40}
    spec = dataclasses.replace(SPECS["mrope"], **sizes, layers=(LayerSpec(),))
    executor = make(spec, device)
    capture(executor, [(2, 2, 2)])
    step = with_images(batch([(0, 4, 5), (1, 2, 3)]), spec, whole=False)
    step = dataclasses.replace(step, embed_rows=None, embeds=None)
    with monkeypatch.context() as patch:
        patch.setattr(executor, "compute", None)  # what a step without a graph would call
        in_graph = executor.forward(step)
    executor.buckets = Buckets(())
    np.testing.assert_array_equal(executor.forward(step), in_graph)


def test_the_token_that_was_drawn_comes_in_on_the_device(device: torch.device) -> None:
    graphs, eager = make(TINY, device), make(TINY, device)
    capture(graphs, [(4, 4, 4)])
    step = batch([(0, 0, 1), (1, 0, 1)])
    token_sources = np.array([-1, 2], np.int32)
    graphs.buffers.drawn[:3] = torch.tensor([3, 1, 9])
    relayed = dataclasses.replace(
        step, token_ids=np.array([7, 0], np.int32), token_sources=token_sources
    )
    known = dataclasses.replace(step, token_ids=np.array([7, 9], np.int32))
    np.testing.assert_array_equal(graphs.forward(relayed), eager.forward(known))


def test_a_draw_in_a_graph_is_that_without(device: torch.device) -> None:
    graphs, eager = make(TINY, device), make(TINY, device)
    capture(graphs, [(2, 2, 2), (4, 4, 4)])
    rows = np.zeros(3, ROW)
    rows["seed"], rows["position"] = 7, np.arange(3)
    rows["temperature"], rows["top_p"], rows["top_k"] = [0, 0.7, 3], 1, [0, 0, 9]
    step = batch([(0, 0, 3)])
    drawn = []
    for executor in (graphs, eager):
        logits = executor.logits(step)
        logits[0, :50] = -np.inf  # as masks do
        for num in (3, 1):
            columns = executor.draws.send(rows[:num].view(np.int32))
            assert columns.shape == (num, ROW.itemsize // 4)
            drawn.append(executor.draws.draw(logits[:num]).tolist())
    assert drawn[:2] == drawn[2:]
    assert drawn[0][0] == drawn[1][0] >= 50
    assert graphs.buffers.drawn[0] == drawn[1][0]


def test_draws_without_limits_are_two_launches(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("CUDA's graphs do not say what they launch")
    executor = make(TINY, device)
    stand_in = partial(RecordedGraphs, list(device_tensors(executor)))
    with torch.inference_mode():
        graphs: dict[DrawSize, Any] = dict(capture_all(stand_in, executor.draws.runs({2})))
    counts = {size: len(graph.launches) for size, graph in graphs.items()}
    assert counts == {DrawSize(2, has_limits=True): 6, DrawSize(2, has_limits=False): 2}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"top_k": 9}, True),
        ({"top_k": 10}, False),
        ({"top_p": 0.9}, True),
        ({"top_p": 0.9, "temperature": 0}, False),
    ],
)
def test_the_host_knows_which_rows_have_limits(fields: dict[str, Any], expected: bool) -> None:
    rows = make_rows(3)
    for name, value in fields.items():
        rows[name][1] = value
    assert has_limits(rows.view(np.int32), vocab_size=10) == expected


def test_a_layer_is_eight_launches(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("CUDA's graphs do not say what they launch")
    counts = []
    for num_layers in (1, 2):
        executor = make(dataclasses.replace(TINY, layers=TINY.layers * num_layers), device)
        capture(executor, [(4, 4, 4)])
        (graph,) = executor.graphs.values()
        assert isinstance(graph, RecordedGraph)
        counts.append(len(graph.launches))
    # Two norms, four products, one of them with the gate, RoPE and attention.
    assert counts[1] - counts[0] == 8


def test_a_thousand_replays_are_one(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("there is no GPU")
    executor = make(TINY, device)
    capture(executor)
    first = {}
    for name, step in STEPS.items():
        first[name] = executor.forward(step)
    reserved = torch.cuda.memory_reserved()
    for _ in range(REPLAYS):
        for step in STEPS.values():
            executor.logits(step)
    for name, step in STEPS.items():
        np.testing.assert_array_equal(executor.forward(step), first[name], name)
    assert torch.cuda.memory_reserved() == reserved


# What captures graphs


class NamedGraphs(RecordedGraphs):
    """Writes down what is run."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(())
        said.append("open")


def say(said: list[str], *names: str) -> dict[str, Callable[[], object]]:
    return {name: partial(said.append, name) for name in names}


def test_graphs_are_captured_in_order_after_a_warm_up() -> None:
    said: list[str] = []
    told: list[tuple[int, int]] = []
    graphs = capture_all(
        partial(NamedGraphs, said), say(said, "a", "b"), progress=lambda *done: told.append(done)
    )
    assert said == ["open", "a", "a", "b", "b"]
    assert list(graphs) == ["a", "b"]
    assert told == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("num_refusals", [1, 2])
def test_all_is_captured_again_once(num_refusals: int) -> None:
    said: list[str] = []
    left = [Recapture("not shared")] * num_refusals

    @contextmanager
    def around() -> Iterator[None]:
        said.append("together")
        yield
        if left:
            raise left.pop()

    def run() -> object:
        return capture_all(partial(NamedGraphs, said), say(said, "a"), around)

    if num_refusals == 2:
        with pytest.raises(Recapture):
            run()
    else:
        run()
    assert said == ["open", "together", "a", "a"] * 2


# Its stand-in


def item(x: Tensor) -> Tensor:
    return x * x[0].item()


def branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def mask(x: Tensor) -> Tensor:
    return x[x > 0]


def host_copy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.ones(3, np.float32))


def host_list(x: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0])


def to_host(x: Tensor) -> Tensor:
    return torch.ones(3) * x.cpu()


@pytest.mark.parametrize("run", [item, branch, mask, host_copy, host_list, to_host])
def test_the_stand_in_refuses_what_a_gpu_would(run: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(3)
    with pytest.raises(NotCapturable):
        RecordedGraphs([x]).capture(lambda: run(x))


def test_the_stand_in_keeps_numbers_and_no_memory() -> None:
    x, out, factor = torch.ones(3), torch.zeros(3), 2
    inside = []

    def run() -> None:
        inside.append(x * factor)
        out.copy_(inside[0]).add_(1)

    graph = RecordedGraphs([x, out]).capture(run)
    x.fill_(5)
    factor = 3
    graph.replay()
    assert out.tolist() == [11.0] * 3
    assert inside[0].isnan().all()
