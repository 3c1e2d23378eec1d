"""A folder whose tokenizer is a tekken.json, served: chats as mistral-common writes them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from mistral_files import SPECIAL, VOCAB_SIZE, right_ids, write_tekken
from servers import RunningServer

MESSAGES = [
    {"role": "system", "content": "Say [INST] or </s>."},
    {"role": "user", "content": "banana 水?"},
]
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"enum": [7]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tekken")
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tekken(folder)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    server = RunningServer(str(folder), "--tokenizer-mode", "mistral")
    try:
        with httpx.Client(base_url=server.url, timeout=300) as made:
            yield made
    finally:
        server.stop()


def post(client: httpx.Client, path: str, **fields: Any) -> Any:
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_prompts_have_the_ids_of_mistral_common(client: httpx.Client, folder: Path) -> None:
    fields = {"messages": MESSAGES, "tools": [TOOL]}
    ids = right_ids(folder / "tekken.json", fields)
    assert post(client, "/tokenize", **fields)["tokens"] == ids
    answer = post(client, "/v1/chat/completions", **fields, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    started = [*MESSAGES, {"role": "assistant", "content": "a ban"}]
    goes_on = {"messages": started, "continue_final_message": True}
    ids = right_ids(folder / "tekken.json", goes_on)
    assert post(client, "/tokenize", **goes_on)["tokens"] == ids


def test_names_of_special_tokens_in_a_text_are_text(client: httpx.Client) -> None:
    ids = post(client, "/tokenize", prompt="[INST]</s>")["tokens"]
    assert ids[0] == SPECIAL.index("<s>")
    assert min(ids[1:]) >= len(SPECIAL)
    assert post(client, "/detokenize", tokens=ids)["prompt"] == "<s>[INST]</s>"


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_is_read(client: httpx.Client, stream: bool) -> None:
    fields = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}
    if not stream:
        answer = post(client, "/v1/chat/completions", **fields)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
        assert json.loads(call["function"]["arguments"]) == {"n": 7}
        assert len(call["id"]) == 9
        return
    arguments = ""
    with client.stream("POST", "/v1/chat/completions", json=fields | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                for part in choice["delta"].get("tool_calls") or ():
                    arguments += part["function"].get("arguments") or ""
    assert json.loads(arguments) == {"n": 7}


def test_what_mistral_common_refuses_is_a_400(client: httpx.Client) -> None:
    messages = [{"role": "narrator", "content": "x"}]
    response = client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert "mistral-common refuses them" in response.json()["error"]["message"]
