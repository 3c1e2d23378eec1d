"""Kernels together are a decoder: the C++ executor's logits, whatever the batch."""

import dataclasses

import numpy as np
import pytest
import torch
from gpu_tests import first_of
from random_decoders import NUM_PAGES, SPEC, SPECS, batch, cpu, random_weights, with_images

from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Executor
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    LayerSpec,
    QKNorm,
    QueryTemperature,
)

SMALL = Tiling(rows=16, keys=16, split_keys=16, enough_programs=6)
FEW = {"num_heads": 2, "num_kv_heads": 1}
SIZES = FEW | {"hidden_size": 32, "intermediate_size": 40}
TINY = dataclasses.replace(SPEC, layers=(LayerSpec(),), **SIZES)
DECODERS = {
    "qwen3, norms of values": dataclasses.replace(TINY, qk_norm=QKNorm.PER_HEAD, value_norm=True),
    "odd sizes": dataclasses.replace(SPECS["biases, odd sizes"], **FEW, layers=(LayerSpec(),)),
    **{
        name: dataclasses.replace(SPECS[name], **SIZES)
        for name in ("gemma", "olmo", "cohere", "sinks", "neox", "apertus")
    },
    "biased norms, clipped": dataclasses.replace(SPECS["biased norms, clipped"], **SIZES),
    "chunks": dataclasses.replace(
        SPECS["chunks"],
        **SIZES,
        layers=(
            LayerSpec(window=9, is_chunked=True),
            LayerSpec(rope=None, temperature=QueryTemperature(scale=0.3, tokens=5)),
        ),
    ),
    "llama": dataclasses.replace(SPECS["llama"], **SIZES),
    "a squared ReLU beside a gate": dataclasses.replace(TINY, activation=Activation.RELU2),
}


def make(spec: DecoderSpec, device: torch.device) -> CudaExecutor:
    return CudaExecutor(
        spec,
        random_weights(spec),
        num_pages=NUM_PAGES,
        page_tokens=16,
        device=device,
        dtype=torch.float32,
        tiling=SMALL,
    )


@pytest.mark.parametrize("name", first_of(10, [*DECODERS]))
def test_logits_are_those_of_the_cpp_executor(name: str, device: torch.device) -> None:
    spec = DECODERS[name]
    ours, theirs = make(spec, device), cpu(spec)
    for parts in ([(0, 0, 14), (2, 0, 3)], [(2, 3, 4), (0, 14, 18), (3, 0, 3)]):
        logits, expected = ours.forward(batch(parts)), theirs.forward(batch(parts))
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("name", first_of(1, ["sinks", "qwen3, norms of values"]))
def test_no_batch_mate_and_no_cut_changes_a_bit(name: str, device: torch.device) -> None:
    spec = DECODERS[name]
    whole = make(spec, device).forward(batch([(0, 0, 21)]))
    mixed = make(spec, device)
    first = mixed.forward(batch([(2, 0, 4), (0, 0, 15), (3, 0, 7)]))
    np.testing.assert_array_equal(first[4:19], whole[:15])
    second = mixed.forward(batch([(3, 7, 9), (0, 15, 20), (2, 4, 5)]))
    np.testing.assert_array_equal(second[2:7], whole[15:20])
    np.testing.assert_array_equal(mixed.forward(batch([(0, 20, 21)])), whole[20:])


def test_rows_of_images_come_in_and_turn_as_in_the_cpp_executor(device: torch.device) -> None:
    spec = dataclasses.replace(SPECS["mrope"], **SIZES, embedding_multiplier=3.0)
    ours, theirs = make(spec, device), cpu(spec)
    for parts in ([(1, 0, 9), (0, 0, 14)], [(0, 14, 24), (1, 9, 10)]):
        step = with_images(batch(parts), spec, whole=False)
        np.testing.assert_allclose(ours.forward(step), theirs.forward(step), atol=1e-4)
    plain = batch([(2, 0, 5)])
    np.testing.assert_allclose(ours.forward(plain), theirs.forward(plain), atol=1e-4)


@pytest.mark.parametrize("parts", first_of(1, [[(1, 0, 5), (0, 0, 23), (2, 0, 3)], [(0, 0, 23)]]))
def test_tokens_of_images_see_each_other_as_in_the_core(
    parts: list[tuple[int, int, int]], device: torch.device
) -> None:
    """Alone, beside others, and behind what came in a step before; then they are decoded."""
    spec = dataclasses.replace(SPECS["gemma"], **SIZES)
    ours, theirs, cut = make(spec, device), cpu(spec), make(spec, device)
    step = with_images(batch(parts), spec)
    logits = ours.forward(step)
    np.testing.assert_allclose(logits, theirs.forward(step), atol=1e-4)
    causal = dataclasses.replace(step, last_seen=None)
    assert np.abs(make(spec, device).forward(causal) - logits).max() > 0.1
    pieces = [cut.forward(with_images(batch([(0, a, b)]), spec)) for a, b in ((0, 21), (21, 23))]
    np.testing.assert_array_equal(np.concatenate(pieces), logits[step.sequences == 0])
    plain = batch([(0, 23, 24)])
    np.testing.assert_allclose(ours.forward(plain), theirs.forward(plain), atol=1e-4)


def test_tokens_of_a_prompt_see_each_other_as_in_the_core(device: torch.device) -> None:
    ours, theirs = make(TINY, device), cpu(TINY)
    step = batch([(0, 0, 19), (2, 0, 3)])
    whole = dataclasses.replace(step, last_seen=np.where(step.sequences == 0, 18, step.positions))
    logits = ours.forward(whole)
    np.testing.assert_allclose(logits, theirs.forward(whole), atol=1e-4)
    np.testing.assert_array_equal(logits[19:], make(TINY, device).forward(step)[19:])
    for plain in (batch([(0, 19, 20), (2, 3, 4)]), batch([(2, 4, 5), (0, 20, 21)])):
        np.testing.assert_allclose(ours.forward(plain), theirs.forward(plain), atol=1e-4)


def test_greedy_text_is_that_of_the_cpp_executor(device: torch.device) -> None:
    def generate(executor: Executor) -> list[list[int]]:
        texts = [[5, 9, 1], [7]]
        step = with_tokens(batch([(0, 0, 3), (1, 0, 1)]), texts[0] + texts[1])
        rows = [2, 3]
        for _ in range(4):
            logits = executor.forward(step)
            for text, row in zip(texts, rows, strict=True):
                text.append(int(logits[row].argmax()))
            parts = [(s, len(text) - 1, len(text)) for s, text in enumerate(texts)]
            step, rows = with_tokens(batch(parts), [text[-1] for text in texts]), [0, 1]
        return texts

    assert generate(make(TINY, device)) == generate(cpu(TINY))


def with_tokens(step: Batch, tokens: list[int]) -> Batch:
    return dataclasses.replace(step, token_ids=np.array(tokens, np.int32))


def test_embeddings_and_a_step_without_logits(device: torch.device) -> None:
    ours, theirs = make(TINY, device), cpu(TINY)
    step = batch([(0, 0, 3), (1, 0, 2)])
    nothing = dataclasses.replace(step, logit_rows=np.empty(0, np.int32))
    assert ours.forward(nothing).shape == (0, TINY.vocab_size)
    last = dataclasses.replace(step, logit_rows=np.array([2, 4], np.int32))
    np.testing.assert_allclose(ours.embed(last), theirs.embed(last), atol=1e-4)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_16_bit_logits_are_near_and_clear_choices_agree(
    dtype: torch.dtype, error: float, device: torch.device
) -> None:
    weights = random_weights(TINY)
    narrow = CudaExecutor(TINY, weights, num_pages=NUM_PAGES, device=device, dtype=dtype)
    step = batch([(0, 0, 9)], page_tokens=32)
    logits, exact = narrow.forward(step), cpu(TINY, page_tokens=32).forward(step)
    np.testing.assert_allclose(logits, exact, atol=error)
    is_clear = np.diff(np.sort(exact)[:, -2:])[:, 0] > 2 * error
    assert is_clear.any()
    np.testing.assert_array_equal(logits.argmax(1)[is_clear], exact.argmax(1)[is_clear])
