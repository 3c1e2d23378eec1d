"""Which tokens' logits score, by the fields that vLLM has for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError
from headrace.model.pooling import (
    DenseActivation,
    Pooling,
    PoolingKind,
    read_pooling,
    score_tokens,
)

BOTH = {"classifier_from_token": ["no", "yes"]}
ORIGINAL = BOTH | {"is_original_qwen3_reranker": True}
IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"no": 3, "yes": 7, "Yes": 8}, "merges": []},
        "added_tokens": [{"id": 9, "content": "<good>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (ORIGINAL, (7, 3)),
        (ORIGINAL | {"method": "no_post_processing"}, (7, 3)),  # as in vLLM
        (BOTH | {"method": "from_2_way_softmax"}, (7, 3)),
        ({"classifier_from_token": ["Yes"], "method": "no_post_processing"}, (8,)),
        ({"classifier_from_token": ["<good>"], "method": "no_post_processing"}, (9,)),
    ],
)
def test_the_last_token_counts_for_and_the_first_against(
    config: dict[str, Any], tokens: tuple[int, ...], folder: Path
) -> None:
    assert score_tokens(folder, config) == tokens


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (BOTH, "method None with 2 tokens of classifier_from_token is not supported"),
        (BOTH | {"method": "no_post_processing"}, "no_post_processing takes one"),
        (ORIGINAL | {"classifier_from_token": ["yes"]}, "from_2_way_softmax takes two"),
        ({"is_original_qwen3_reranker": True}, "classifier_from_token is None, not tokens"),
        (ORIGINAL | {"classifier_from_token": "yes"}, "classifier_from_token is 'yes', not tokens"),
        (ORIGINAL | {"classifier_from_token": ["no", "yes!"]}, "'yes!' .* is not one token"),
    ],
)
def test_other_fields_are_refused(config: dict[str, Any], says: str, folder: Path) -> None:
    with pytest.raises(ModelError, match=says):
        score_tokens(folder, config)


def test_scores_are_within_0_and_1_unless_the_config_differs(folder: Path) -> None:
    config = {"model_type": "qwen3", "max_position_embeddings": 64, **ORIGINAL}
    found = read_pooling(folder, config)
    assert found == Pooling(
        PoolingKind.LAST,
        max_tokens=64,
        scores=True,
        score_tokens=(7, 3),
        activation=DenseActivation.SIGMOID,
    )
    plain = read_pooling(folder, config | IDENTITY)
    assert plain is not None
    assert plain.activation is DenseActivation.IDENTITY
    with pytest.raises(ModelError, match="an encoder has no logits"):
        read_pooling(folder, config | {"model_type": "bert"})
