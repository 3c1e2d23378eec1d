"""Prompts that are scored and not continued, and tokens that are named by their ids."""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import RunningServer

TIMEOUT_S = 300
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["1, 2, 3,", "The capital of France is Paris."]
HELLO = [{"role": "user", "content": "Hi"}]
SCORED: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}


@pytest.fixture(scope="module")
def short() -> Iterator[RunningServer]:
    """A server whose context is soon full, in several steps."""
    steps = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8")
    running = RunningServer("--max-model-len", "64", *steps)
    yield running
    assert running.stop() == 0


@pytest.fixture(params=["whole", "streamed"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """In which form an answer is asked for."""
    yield request.param


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream."""
    with httpx.stream("POST", server.url + path, json=body, timeout=TIMEOUT_S) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def choices_of(server: RunningServer, form: str, body: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the choices of an answer, put together where it streams, and its usage."""
    if form == "whole":
        answer = post(server, TEXT, body)
        return answer["choices"], answer["usage"]
    wanted = body | {"stream": True, "stream_options": {"include_usage": True}}
    found: dict[int, Any] = {}
    usage = None
    for chunk in events_of(server, TEXT, wanted):
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            whole = found.setdefault(choice["index"], {"text": "", "logprobs": None})
            whole["text"] += choice["text"]
            whole["logprobs"] = whole["logprobs"] or choice["logprobs"]
            whole["finish_reason"] = choice["finish_reason"]
    return [found[index] for index in sorted(found)], usage


def test_scored_prompts_have_logprobs_and_no_new_token(server: RunningServer, form: str) -> None:
    choices, usage = choices_of(server, form, SCORED)
    continued = post(server, TEXT, SCORED | {"max_tokens": 1})
    assert [choice["text"] for choice in choices] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    for choice, longer in zip(choices, continued["choices"], strict=True):
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == choice["text"]
        expected = longer["logprobs"]["token_logprobs"][: len(told["tokens"])]
        assert told["token_logprobs"][0] is None
        assert all(map(math.isclose, told["token_logprobs"][1:], expected[1:]))
        assert choice["finish_reason"] == "length"
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == continued["usage"]["prompt_tokens"] == usage["total_tokens"]


def test_zero_tokens_without_echo_are_an_empty_answer(server: RunningServer, form: str) -> None:
    (choice,), usage = choices_of(server, form, {"prompt": "Hi", "max_tokens": 0})
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert usage["completion_tokens"] == 0


def test_zero_tokens_with_prompt_logprobs_tell_the_prompts(server: RunningServer) -> None:
    body = {"prompt": [504, 3575, 282], "max_tokens": 0, "prompt_logprobs": 2}
    (choice,) = post(server, TEXT, body)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert (first, choice["text"]) == (None, "")
    assert [str(id) in one for id, one in zip([3575, 282], others, strict=True)] == [True, True]


def test_a_scored_prompt_may_fill_the_context(short: RunningServer) -> None:
    length = httpx.get(f"{short.url}/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": [504] * length, "max_tokens": 0}
    assert post(short, TEXT, body)["usage"]["prompt_tokens"] == length


def test_only_allowed_token_ids_are_drawn(server: RunningServer) -> None:
    allowed = [28, 33, 34]
    body = {"prompt": "1, 2,", "max_tokens": 12, "temperature": 1.5, "return_token_ids": True}
    (choice,) = post(server, TEXT, body | {"allowed_token_ids": allowed})["choices"]
    assert len(choice["token_ids"]) == 12
    assert set(choice["token_ids"]) <= set(allowed)


def test_allowed_token_ids_hold_beside_a_grammar(server: RunningServer) -> None:
    singles = [post(server, "/tokenize", {"prompt": one})["tokens"][0] for one in "ac"]
    body = {"prompt": "x", "max_tokens": 6, "guided_regex": "[abc]{6}", "return_token_ids": True}
    (choice,) = post(server, TEXT, body | {"allowed_token_ids": singles})["choices"]
    assert len(choice["text"]) == 6
    assert set(choice["token_ids"]) <= set(singles)


def test_tokens_are_reported_as_their_ids(server: RunningServer) -> None:
    admin_request = {"return_tokens_as_token_ids": True, "return_token_ids": True, "temperature": 0}
    text = post(server, TEXT, {"prompt": "Hi", "max_tokens": 3, "logprobs": 2} | admin_request)[
        "choices"
    ][0]
    names = [f"token_id:{id}" for id in text["token_ids"]]
    assert text["logprobs"]["tokens"] == names
    assert all(
        name in top for name, top in zip(names, text["logprobs"]["top_logprobs"], strict=True)
    )
    body = {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 1} | admin_request
    chat = post(server, CHAT, body)["choices"][0]
    content = chat["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{id}" for id in chat["token_ids"]]
    spelled = bytes(byte for one in content for byte in one["bytes"])
    assert spelled.decode() == chat["message"]["content"]
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]


def test_max_tokens_beyond_the_context_is_cut(short: RunningServer) -> None:
    length = httpx.get(f"{short.url}/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": [504] * (length - 2), "max_tokens": 100, "ignore_eos": True}
    assert post(short, TEXT, body)["usage"]["completion_tokens"] == 2
