"""A folder whose tokenizer is a tekken.json, served: chats as mistral-common writes them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from image_parts import data_url, encoded, image_part
from mistral_common.tokens.tokenizers import image as mistral_image
from mistral_files import SPECIAL, VOCAB_SIZE, right_ids, write_tekken
from servers import RunningServer
from tiny_vision import picture, vision_config

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
    return tmp_path_factory.mktemp("tekken")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """A small random Mistral 3, as it is saved in the folder: beside a tekken.json alone."""
    torch.manual_seed(0)
    config: Any = vision_config("mistral3")
    config.image_token_index = SPECIAL.index("[IMG]")
    config.text_config.vocab_size = VOCAB_SIZE
    config.text_config.eos_token_id = SPECIAL.index("</s>")
    model = transformers.AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.eval().save_pretrained(folder)
    limits = {"image_patch_size": 7, "max_image_size": 56, "spatial_merge_size": 2}
    write_tekken(folder, "v13", {"image": limits})
    return model


@pytest.fixture(scope="module")
def client(folder: Path, model: Any) -> Iterator[httpx.Client]:
    precise = ("--dtype", "float32", "--kv-cache-dtype", "float32")
    server = RunningServer(str(folder), "--tokenizer-mode", "mistral", *precise)
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


def test_an_image_is_seen_where_mistral_common_writes_it(
    client: httpx.Client, folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mistral_image, "transform_image", lambda *_: np.zeros(0))  # OpenCV's
    image = picture(1)
    shown = image_part(data_url(encoded(image)))
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, shown]}]
    ids = right_ids(folder / "tekken.json", {"messages": messages})
    assert post(client, "/tokenize", messages=messages)["tokens"] == ids
    asked = {"messages": messages, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    answer = post(client, "/v1/chat/completions", **asked, logprobs=True, return_token_ids=True)
    sizes = {"size": {"longest_edge": 56}, "patch_size": 14}
    made = transformers.PixtralImageProcessorPil(**sizes)(image, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor([ids]),
            pixel_values=made["pixel_values"],
            image_sizes=made["image_sizes"],
            min_new_tokens=16,
            max_new_tokens=16,
            do_sample=False,
        )
    assert answer["choices"][0]["token_ids"] == output[0, len(ids) :].tolist()


def test_names_of_special_tokens_in_a_text_are_text(client: httpx.Client) -> None:
    ids = post(client, "/tokenize", prompt="[INST]</s>")["tokens"]
    assert ids[0] == SPECIAL.index("<s>")
    assert min(ids[1:]) >= len(SPECIAL)
    assert post(client, "/detokenize", tokens=ids)["prompt"] == "<s>[INST]</s>"


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_is_read(client: httpx.Client, stream: bool) -> None:
    fields: dict[str, Any] = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}
    fields |= {"parallel_tool_calls": False}  # random weights may call again
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
