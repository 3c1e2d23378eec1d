"""Vocabularies agree where their common tokens do."""

import json
from pathlib import Path

import pytest

from headrace.config.model_card import find_demo_model
from headrace.model.vocabulary import first_difference, read_vocabulary

TOKENS = {0: "a", 1: "b", 2: "c"}


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (TOKENS, None),
        (TOKENS | {3: "<pad>"}, None),
        ({0: "a", 1: "x", 2: "c"}, 1),
        ({0: "a", 2: "c"}, 1),
    ],
)
def test_vocabularies_agree_but_for_padding(other: dict[int, str], differing: int | None) -> None:
    assert first_difference(TOKENS, other) == differing
    assert first_difference(other, TOKENS) == differing


def test_vocabulary_has_added_tokens(tmp_path: Path) -> None:
    spec = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<end>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert read_vocabulary(tmp_path) == {0: "a", 1: "<end>"}


def test_vocabulary_of_gguf_has_all_tokens() -> None:
    demo = find_demo_model()
    assert demo is not None
    assert len(read_vocabulary(demo)) == 49152
