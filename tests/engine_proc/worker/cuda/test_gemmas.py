"""Gemma 3n and 4 on GPUs: the logits of the C++ core, whatever the batch, and its texts."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import family_table
import numpy as np
import pytest
import torch
from decoder_cases import DecoderCase, decoder_case
from gemma_models import GEMMAS
from generation import PROMPTS, Generation, HalfRightProposer
from gpu_tests import first_of, rarely
from on_kernels import OnKernels
from random_decoders import GEMMA_SPECS, NUM_PAGES, batch, cpu, random_weights, with_images
from recorded_graphs import RecordedGraphs, device_tensors

from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes
from headrace.engine_proc.worker.cuda.graphs import CudaGraphs

NUM_TOKENS = 4 if family_table.WRITES else 3
FOUR, THREE = "gemma4", "gemma3n"


def make(name: str, device: torch.device, **options: Any) -> CudaExecutor:
    spec = GEMMA_SPECS[name]
    return CudaExecutor(
        spec,
        random_weights(spec),
        num_pages=NUM_PAGES,
        page_tokens=16,
        device=device,
        tiling=Tiling(rows=16, keys=16, split_keys=16, enough_programs=6),
        largest=Sizes(64, 4, 64),
        max_model_len=304,
        **({"dtype": torch.float32} | options),
    )


@pytest.mark.parametrize("name", GEMMA_SPECS)
def test_gemmas_have_the_logits_of_the_core(name: str, device: torch.device) -> None:
    ours, theirs = make(name, device), cpu(GEMMA_SPECS[name])
    for parts in ([(0, 0, 9), (2, 0, 2)], [(2, 2, 3), (0, 9, 15)]):
        logits, expected = ours.forward(batch(parts)), theirs.forward(batch(parts))
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("name", first_of(1, [THREE, FOUR, "gemma4, experts"]))
def test_batch_mates_and_cuts_change_no_bit_of_gemmas(name: str, device: torch.device) -> None:
    options = {"dtype": torch.bfloat16}
    whole = make(name, device, **options).forward(batch([(0, 0, 10)]))
    mixed = make(name, device, **options)
    first = mixed.forward(batch([(2, 0, 2), (0, 0, 7)]))
    np.testing.assert_array_equal(first[2:], whole[:7])
    second = mixed.forward(batch([(0, 7, 10), (2, 2, 3)]))
    np.testing.assert_array_equal(second[:3], whole[7:])


@pytest.mark.parametrize("name", first_of(1, [*reversed(GEMMA_SPECS)]))
def test_gemmas_in_graphs_have_the_logits_without(name: str, device: torch.device) -> None:
    graphs, eager = make(name, device), make(name, device)
    stand_in = partial(RecordedGraphs, list(device_tensors(graphs)))
    graphs.capture(Buckets([Sizes(4, 2, 4)]), stand_in if device.type == "cpu" else CudaGraphs)
    for parts in ([(0, 0, 2), (2, 0, 1)], [(2, 1, 2), (0, 2, 3)]):
        np.testing.assert_array_equal(graphs.forward(batch(parts)), eager.forward(batch(parts)))
    for ours, theirs in zip(graphs.kv.groups, eager.kv.groups, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", first_of(1, [FOUR, THREE]))
def test_images_of_gemmas_are_seen_as_in_the_core(name: str, device: torch.device) -> None:
    """In layers that are not causal alone, and with the first token's embeddings per layer."""
    ours, theirs, spec = make(name, device), cpu(GEMMA_SPECS[name]), GEMMA_SPECS[name]
    step = with_images(batch([(1, 0, 2), (0, 0, 23)]), spec)
    logits = ours.forward(step)
    np.testing.assert_allclose(logits, theirs.forward(step), atol=1e-4)
    causal = make(name, device).forward(dataclasses.replace(step, last_seen=None))
    assert np.abs(causal - logits).max() > 0.1
    plain = batch([(0, 23, 24)])
    np.testing.assert_allclose(ours.forward(plain), theirs.forward(plain), atol=1e-4)


@pytest.mark.parametrize(("name", "numbers"), [(FOUR, 2 * 16 + 4 * 24), (THREE, 2 * 2 * 16)])
def test_pages_have_room_where_a_layer_owns_keys(
    name: str, numbers: int, device: torch.device
) -> None:
    """Heads have their own sizes, and layers that read others' keys have none."""
    assert make(name, device).page_bytes == 4 * 16 * numbers
    narrow = make(name, device, kv_dtype=torch.float8_e4m3fn)
    assert narrow.page_bytes == 16 * numbers


def generation(made: DecoderCase, **options: Any) -> Generation:
    make: Callable[..., Any] = partial(
        OnKernels, made.ours.spec, made.ours.weights, max_model_len=96
    )
    return Generation(make, num_states=0, **options)


@rarely
@pytest.mark.parametrize("case", sorted(GEMMAS))
def test_gemmas_on_gpus_generate_the_text_of_transformers(case: str) -> None:
    """In chunks, then from known pages, and with drafts of which one in four is wrong."""
    made = decoder_case(case)
    own = generation(made, budget=23, speculation=HalfRightProposer(made.answers))
    for _ in range(2):
        sequence = own.add(PROMPTS[2], NUM_TOKENS)
        own.run()
        assert list(sequence.generated) == made.answers[2][:NUM_TOKENS]
    counts = own.scheduler.counts
    assert counts.prefix_hits > 0
    assert counts.drafts > 0


@rarely
@pytest.mark.parametrize("case", ["gemma3n_text", "gemma4_text"])
def test_gemmas_on_gpus_say_the_same_after_preemption(case: str) -> None:
    made = decoder_case(case)
    own = generation(made, num_pages=6)
    sequences = [own.add(prompt, 4) for prompt in PROMPTS]
    own.run()
    assert own.scheduler.counts.preemptions > 0
    texts = [list(sequence.generated) for sequence in sequences]
    assert texts == [answer[:4] for answer in made.answers]
