"""Cross-encoders say of a batch what they say of each sequence alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.hf.classifier import open_classifier
from headrace.errors import ModelError
from headrace.model.pooling import DenseActivation

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 100,
    "num_labels": 1,
}
DEBERTA = {  # disentangled attention, as mxbai-rerank has it
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_biased_input": False,
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "pooler_hidden_size": 32,
    "initializer_range": 0.3,
}


def save(folder: Path, kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **TINY, **fields)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def batch(texts: list[list[int]], seconds: list[int]) -> Batch:
    counts = [len(text) for text in texts]
    types = [int(i >= s) for n, s in zip(counts, seconds, strict=True) for i in range(n)]
    return Batch(
        token_ids=np.concatenate(texts).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in counts]).astype(np.int32),
        sequences=np.repeat(np.arange(len(texts), dtype=np.int32), counts),
        page_table=np.zeros((len(texts), 1), np.int32),
        logit_rows=np.cumsum(counts, dtype=np.int32) - 1,
        token_types=np.array(types, np.int32),
    )


@pytest.mark.parametrize(
    ("kind", "fields", "has_types"),
    [
        ("bert", {}, True),
        ("electra", {"embedding_size": 16}, True),
        ("roberta", {"type_vocab_size": 1}, False),
        ("distilbert", {"dim": 32, "n_layers": 2, "n_heads": 4}, False),
        ("modernbert", {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}, False),
        ("deberta-v2", DEBERTA, False),
        ("deberta", DEBERTA, False),
    ],
)
def test_each_sequence_is_scored_alone(
    tmp_path: Path, kind: str, fields: dict[str, Any], has_types: bool
) -> None:
    model = save(tmp_path, kind, **fields)
    texts, seconds = [[4, 5, 6, 7, 8], [9, 10, 11]], [2, 1]
    scores = open_classifier(tmp_path, dtype="float32", activation=DenseActivation.IDENTITY).embed(
        batch(texts, seconds)
    )
    for text, second, score in zip(texts, seconds, scores, strict=True):
        inputs = {"input_ids": torch.tensor([text])}
        if has_types:
            types = [int(position >= second) for position in range(len(text))]
            inputs["token_type_ids"] = torch.tensor([types])
        with torch.inference_mode():
            expected = model(**inputs).logits[0].numpy()
        np.testing.assert_allclose(score, expected, atol=1e-5)


def test_a_sigmoid_is_between_0_and_1(tmp_path: Path) -> None:
    save(tmp_path, "bert")
    text = batch([[4, 5]], [1])
    both = [
        open_classifier(tmp_path, dtype="float32", activation=activation).embed(text)
        for activation in (DenseActivation.IDENTITY, DenseActivation.SIGMOID)
    ]
    np.testing.assert_allclose(both[1], 1 / (1 + np.exp(-both[0])), rtol=1e-6)


def test_a_folder_without_the_head_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "bert").bert.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"tensor 'classifier\.bias' is missing"):
        open_classifier(tmp_path, dtype="float32", activation=DenseActivation.IDENTITY)
