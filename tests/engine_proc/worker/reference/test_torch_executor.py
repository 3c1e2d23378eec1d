"""The reference executor: what is in a batch with a sequence does not change what it is told."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.model import DecoderModel, open_model
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor

TEXTS = [[17, 3, 94, 55, 8, 61, 42, 7, 23], [88, 31], [12, 70, 5, 64, 29, 90]]
PAGES = np.array([[7, 2, 9], [0, 8, 4], [5, 1, 3]], np.int32)


@pytest.fixture(params=["llama", "gemma3_text", "cohere"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> DecoderModel:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 4,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    if request.param == "llama":
        del shape["sliding_window"]
    if request.param == "cohere":
        del shape["sliding_window"], shape["head_dim"]
    config = transformers.AutoConfig.for_model(request.param, **shape)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return open_model(tmp_path)


def executor(model: DecoderModel, **options: Any) -> TorchExecutor:
    return TorchExecutor(model.spec, model.weights, num_pages=10, page_tokens=4, **options)


def batch(parts: Sequence[tuple[int, int, int]]) -> Batch:
    """Tokens `start` to `stop` of some sequences, with the logits of all."""
    counts = [stop - start for _, start, stop in parts]
    return Batch(
        token_ids=np.concatenate([TEXTS[s][a:b] for s, a, b in parts]).astype(np.int32),
        positions=np.concatenate([np.arange(a, b) for _, a, b in parts]).astype(np.int32),
        sequences=np.repeat([s for s, _, _ in parts], counts).astype(np.int32),
        page_table=PAGES,
        logit_rows=np.arange(sum(counts), dtype=np.int32),
    )


def alone(model: DecoderModel, sequence: int) -> Floats:
    return executor(model).forward(batch([(sequence, 0, len(TEXTS[sequence]))]))


def test_sequences_in_one_batch_do_not_see_each_other(model: DecoderModel) -> None:
    logits = executor(model).forward(batch([(2, 0, 6), (0, 0, 9), (1, 0, 2)]))
    expected = np.concatenate([alone(model, s) for s in (2, 0, 1)])
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_chunks_and_decodes_share_a_batch(model: DecoderModel) -> None:
    run = executor(model)
    first = run.forward(batch([(0, 0, 5), (1, 0, 1)]))
    second = run.forward(batch([(1, 1, 2), (0, 5, 9), (2, 0, 6)]))
    np.testing.assert_allclose(first[:5], alone(model, 0)[:5], atol=1e-4)
    np.testing.assert_allclose(second[0], alone(model, 1)[1], atol=1e-4)
    np.testing.assert_allclose(second[1:5], alone(model, 0)[5:], atol=1e-4)


def test_only_the_wanted_rows_are_returned(model: DecoderModel) -> None:
    whole = batch([(0, 0, 9), (2, 0, 6)])
    wanted = Batch(
        whole.token_ids,
        whole.positions,
        whole.sequences,
        whole.page_table,
        np.array([8, 14], np.int32),
    )
    logits = executor(model).forward(wanted)
    np.testing.assert_allclose(logits, executor(model).forward(whole)[[8, 14]], atol=1e-5)
    assert logits.dtype == np.float32


def test_what_an_earlier_owner_left_in_a_page_does_not_matter(model: DecoderModel) -> None:
    run = executor(model)
    for pages in run.kv:
        pages.fill_(float("nan"))
    np.testing.assert_allclose(run.forward(batch([(0, 0, 9)])), alone(model, 0), atol=1e-5)


def test_bfloat16_stays_close(model: DecoderModel) -> None:
    rough = executor(model, dtype=torch.bfloat16).forward(batch([(0, 0, 9)]))
    exact = alone(model, 0)
    assert np.abs(rough - exact).mean() < 0.05 * np.abs(exact).mean()
