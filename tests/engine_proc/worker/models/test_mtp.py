"""Layers that predict further tokens draft what they do in torch, from the model's own pages."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_twins import write_gguf
from mtp_models import CASES, MtpReference, make_mtp, save_mtp

from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.execution.mtp_executor import MtpExecutor
from headrace.engine_proc.worker.models.model import open_model
from headrace.errors import ModelError

TOKENS = [17, 3, 94, 55, 8, 61, 42, 7, 23, 88, 31, 12, 77, 50, 2, 9, 63, 64, 11, 90]
PAGE_TOKENS = 16
DRAFT = 33  # whatever is drafted behind them


class Text:
    """A text in the core, which is computed as a model and drafted behind as its last layer."""

    def __init__(self, path: Path, tokens: list[int]) -> None:
        ours = open_model(path, drafts=True)
        self._model = CpuExecutor(
            ours.spec, ours.weights, num_pages=4, num_states=3, page_tokens=PAGE_TOKENS, threads=2
        )
        self._has_states = bool(ours.spec.state_numbers)
        self._layer = MtpExecutor(self._model)
        self._tokens = tokens

    def batch(self, start: int, end: int) -> Batch:
        places = np.arange(start, end, dtype=np.int32)
        return Batch(
            token_ids=np.array(self._tokens[start:end], np.int32),
            positions=places,
            sequences=np.zeros(end - start, np.int32),
            page_table=np.array([[2, 0, 3]], np.int32),
            logit_rows=np.arange(end - start, dtype=np.int32),
        )

    def compute(self, start: int, end: int) -> None:
        """Do as a step of the model."""
        batch = self.batch(start, end)
        if self._has_states:
            slots = [[-1 if start == 0 else start % 2], [end % 2 if start else 1]]
            state_in, state_out = (np.array(slot, np.int32) for slot in slots)
            assert start == 0 or state_in[0] != state_out[0]
            batch = Batch(**{**vars(batch), "state_in": state_in, "state_out": state_out})
        self._model.logits(batch)

    def draft(self, start: int, end: int, draws: bool = True) -> Floats:
        """Return the logits of a draft's step: behind its last token, or none."""
        batch = self.batch(start, end)
        last = batch.logit_rows[-1:] if draws else batch.logit_rows[:0]
        batch = Batch(**{**vars(batch), "logit_rows": last})
        return self._layer.logits(batch).rows.copy()


@pytest.mark.parametrize("case", CASES)
def test_layer_of_further_tokens_drafts_as_in_torch(case: str, tmp_path: Path) -> None:
    check(save_mtp(case, tmp_path), tmp_path)


def check(reference: MtpReference, path: Path) -> None:
    """Compare drafts behind all tokens, and behind a draft: its hidden state is the layer's own."""
    text = Text(path, [*TOKENS, DRAFT])
    count = len(TOKENS)
    with torch.inference_mode():
        hidden = reference.hidden(TOKENS)
        logits, states = reference.drafted(TOKENS, hidden[:-1])
        known = torch.cat([hidden[:-1], states[-1:]])
        further, _ = reference.drafted([*TOKENS, DRAFT], known)
    text.compute(0, count - 1)
    ours = text.draft(1, count)
    torch.testing.assert_close(torch.from_numpy(ours), logits[-1:], atol=2e-3, rtol=2e-3)
    ours = text.draft(count, count + 1)
    torch.testing.assert_close(torch.from_numpy(ours), further[-1:], atol=2e-3, rtol=2e-3)
    assert (further[-1] - logits[-1]).abs().max() > 0.1  # far more than the tolerance


@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe"])
def test_drafts_do_not_depend_on_chunks(case: str, tmp_path: Path) -> None:
    save_mtp(case, tmp_path)
    whole, chunked = Text(tmp_path, TOKENS), Text(tmp_path, TOKENS)
    count = len(TOKENS)
    whole.compute(0, count - 1)
    for start, end in ((0, 5), (5, 17), (17, count - 1)):
        chunked.compute(start, end)
    chunked.draft(1, 9, draws=False)
    chunked.draft(9, count - 1, draws=False)
    ours = chunked.draft(count - 1, count)
    assert np.array_equal(ours, whole.draft(1, count))


def test_gguf_file_has_its_layer_of_further_tokens(tmp_path: Path) -> None:
    whole, reference = make_mtp("glm4_moe")
    last = f"blk.{whole.config.num_hidden_layers - 1}.nextn."
    names = {"shared_head.norm": "shared_head_norm"}
    outer = {
        f"{last}{names.get(name, name)}.weight": tensor.numpy()
        for name, tensor in reference.outer.items()
    }
    path = write_gguf(tmp_path / "a.gguf", whole, extra=outer, keys={"nextn_predict_layers": 1})
    check(reference, path)


def test_missing_layer_of_further_tokens_is_named(tmp_path: Path) -> None:
    whole, _ = make_mtp("glm4_moe")
    whole.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no layer that predicts further tokens \(model.layers.3"):
        open_model(tmp_path, drafts=True)
