"""Prompts are those of mistral-common, token for token."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_files import DATA, SETTINGS, SPECIAL, right_ids, write_tekken

from headrace.errors import ModelError, RequestError
from headrace.tokenizer_proc.encoding.chat_template import TemplateTooSlow
from headrace.tokenizer_proc.encoding.mistral_template import MAX_CHARACTERS, MistralTemplate
from headrace.tokenizer_proc.requests.openai import decode_chat, decode_tokenize

VERSIONS = ("v3", "v7", "v11", "v13")
REAL_FILES = (  # that mistral-common ships, but for an older tekken file
    "tekken_240911.json",
    *(f"mistral_instruct_tokenizer_{name}" for name in ("240216.model.v2", "240323.model.v3")),
    *(f"mistral_instruct_tokenizer_241114.model.{version}" for version in ("v7", "v7m1")),
    "tokenizer.model.v1",
)
USER = {"role": "user", "content": "anana 水?"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def called(id: str) -> list[dict[str, Any]]:
    """Return a call and its result."""
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": id}]}
    return [answer, {"role": "tool", "tool_call_id": id, "content": "rain"}]


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "a question": {"messages": [USER]},
    "a system prompt": {"messages": [SYSTEM, USER]},
    "names of special tokens": {"messages": [{"role": "user", "content": "</s>[INST] <s>"}]},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]
    },
    "turns": {"messages": [USER, {"role": "assistant", "content": "a banana"}, USER]},
    "an answer that goes on": {
        "messages": [USER, {"role": "assistant", "content": "a ban"}],
        "continue_final_message": True,
    },
    "tools": {"messages": [SYSTEM, USER], "tools": [TOOL]},
    "a tool without parameters": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "now"}}],
    },
    "a result": {"messages": [USER, *called("123456789")], "tools": [TOOL]},
}


@pytest.fixture(scope="module", params=VERSIONS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tekken(tmp_path_factory.mktemp(request.param), request.param)


def ids_of(template: MistralTemplate, body: dict[str, Any]) -> list[int]:
    prompt = template.prompt(decode_chat(msgspec.json.encode(body)))
    assert prompt.ids is not None
    return prompt.ids.tolist()


def test_prompts_are_those_of_mistral_common(file: Path) -> None:
    template = MistralTemplate(str(file), {})
    for name, body in CONVERSATIONS.items():
        assert ids_of(template, body) == right_ids(file, body), name


@pytest.mark.parametrize("name", REAL_FILES)
def test_prompts_of_real_files_are_those_of_mistral_common(name: str) -> None:
    right = MistralTokenizer.from_file(DATA / name)
    template = MistralTemplate(str(DATA / name), {})
    for body in list(CONVERSATIONS.values())[: 6 if name.endswith("v1") else 9]:
        assert ids_of(template, body) == right_ids(right, body)


def test_thoughts_of_earlier_answers_are_written(tmp_path: Path) -> None:
    file = write_tekken(tmp_path)
    answer = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    body = {"messages": [USER, answer, USER]}
    ids = ids_of(MistralTemplate(str(file), {}), body)
    assert ids == right_ids(file, body)
    assert SPECIAL.index("[THINK]") in ids


def test_long_ids_of_calls_are_cut_as_in_vllm(tmp_path: Path) -> None:
    file = write_tekken(tmp_path, "v3")
    template = MistralTemplate(str(file), {})
    long = ids_of(template, {"messages": [USER, *called("call_abc123456789")]})
    assert long == right_ids(file, {"messages": [USER, *called("123456789")]})


def test_the_text_of_a_prompt_names_its_special_tokens(tmp_path: Path) -> None:
    file = write_tekken(tmp_path, "v7")
    template = MistralTemplate(str(file), {})
    body = decode_tokenize(msgspec.json.encode({"messages": [SYSTEM, USER]}))
    wanted = "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]anana 水?[/INST]"
    assert template.prompt(body).text == wanted


def test_an_effort_is_for_the_versions_that_have_one(tmp_path: Path) -> None:
    old = MistralTemplate(str(write_tekken(tmp_path, "v13")), {})
    body = {"messages": [USER]}
    assert ids_of(old, body | {"reasoning_effort": "high"}) == ids_of(old, body)
    file = write_tekken(tmp_path, "v15", {"model_settings_builder": SETTINGS})
    new, body = MistralTemplate(str(file), {}), body | {"reasoning_effort": "high"}
    assert ids_of(new, body) == right_ids(file, body)
    assert SPECIAL.index("[MODEL_SETTINGS]") in ids_of(new, body)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "continue_final_message"),
        ({"messages": [USER], "continue_final_message": True}, "requires final message to be an"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "Unknown message role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "mistral-common refuses them"),
        ({"messages": [USER], "chat_template": "x"}, "chat_template: mistral-common writes"),
        ({"messages": [USER], "documents": [{"text": "x"}]}, "documents: mistral-common writes"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "takes text"),
        ({"messages": [USER | {"content": "a" * (MAX_CHARACTERS + 1)}]}, "send less"),
        ({"messages": [USER | {"content": " " * 1_000_000}]}, "mistral-common refuses them"),
    ],
)
def test_what_mistral_common_has_no_place_for_is_refused(
    body: dict[str, Any], says: str, tmp_path: Path
) -> None:
    template = MistralTemplate(str(write_tekken(tmp_path)), {})
    with pytest.raises(RequestError, match=says):
        ids_of(template, body)


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_conversation_that_takes_long_is_interrupted(tmp_path: Path) -> None:
    template = MistralTemplate(str(write_tekken(tmp_path)), {}, patience_s=0.01)
    body = {"messages": [USER] * 20_000}
    with pytest.raises(TemplateTooSlow, match=r"mistral-common takes more than 0\.01 s"):
        ids_of(template, body)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tekken.json"
    file.write_text('{"config": {"version": "v99"}}')
    with pytest.raises(ModelError, match=r"tekken\.json: mistral-common cannot read it"):
        MistralTemplate(str(file), {})
