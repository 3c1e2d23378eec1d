"""Fields of the flag replace those of a folder's config."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.model.config_json import overridden

FOLDER = Path("/m")
QWEN = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 8, "vocab_size": 4}


def test_fields_are_replaced_or_added() -> None:
    assert overridden(FOLDER, QWEN, None) == QWEN
    flag = '{"max_position_embeddings": 16, "method": "x"}'
    assert overridden(FOLDER, QWEN, flag) == QWEN | {"max_position_embeddings": 16, "method": "x"}


def test_those_of_the_text_are_replaced_one_by_one() -> None:
    config = {"text_config": QWEN, "rope": {"a": 1}}
    merged = overridden(FOLDER, config, '{"text_config": {"vocab_size": 5}, "rope": {"b": 2}}')
    assert merged == {"text_config": QWEN | {"vocab_size": 5}, "rope": {"b": 2}}


def test_an_architecture_is_one_of_the_family() -> None:
    for name in ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"):
        flag = json.dumps({"architectures": [name]})
        assert overridden(FOLDER, QWEN, flag)["architectures"] == [name]


@pytest.mark.parametrize(
    "architectures", [["GemmaForSequenceClassification"], ["Qwen3Model"], "Qwen3ForCausalLM", []]
)
def test_another_architecture_is_refused_with_those_there_are(architectures: Any) -> None:
    says = r"not supported for /m; \['Qwen3ForCausalLM'\] or \['Qwen3ForSequenceClassification'\] "
    with pytest.raises(ConfigError, match=says):
        overridden(FOLDER, QWEN, json.dumps({"architectures": architectures}))


@pytest.mark.parametrize("flag", ["", "{", "[]", '"x"', '{"a": NaN}'])
def test_what_is_no_json_object_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"--hf-overrides .* is not a JSON object: "):
        overridden(FOLDER, QWEN, flag)
