"""Texts become the tokens they should, whatever else is being tokenized."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import tokenizers
from servers import RunningServer

from headrace.config.model_card import find_demo_model
from headrace.model.tokenizer_json import read_tokenizer_json

CONCURRENT = 256
TIMEOUT_S = 300
WORDS = "the river ran past mill meadow sea no ship had crossed 12 çà 水"


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    path = find_demo_model()
    assert path is not None
    return tokenizers.Tokenizer.from_buffer(read_tokenizer_json(path))


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=CONCURRENT, max_keepalive_connections=0)
    with httpx.Client(base_url=server.url, limits=limits, timeout=TIMEOUT_S) as made:
        yield made


def post(client: httpx.Client, path: str, **fields: Any) -> Any:
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def some_words(number: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS.split(), k=number))


def complete(client: httpx.Client, fields: dict[str, Any]) -> tuple[str, int]:
    """Return the text, the end of the prompt before it, and how many tokens that has."""
    admin_requests = {"max_tokens": 1, "temperature": 0, "echo": True} | fields
    answer = post(client, "/v1/completions", **admin_requests)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]


def test_prompts_that_are_cut_and_others_do_not_mix(client: httpx.Client) -> None:
    texts = [some_words(12, seed) for seed in range(8)]
    admin_requests = [
        {"prompt": text} | ({"truncate_prompt_tokens": 3 + i % 4} if cut else {})
        for i, text in enumerate(texts)
        for cut in (False, True)
    ]
    alone = [complete(client, admin_request) for admin_request in admin_requests]
    assert {number for _, number in alone[1::2]} == {3, 4, 5, 6}
    assert min(number for _, number in alone[::2]) >= 12
    with ThreadPoolExecutor(CONCURRENT) as pool:
        jobs = [
            pool.submit(complete, client, admin_request)
            for admin_request in admin_requests * (CONCURRENT // 16)
        ]
        assert [job.result() for job in jobs] == alone * (CONCURRENT // 16)


def test_a_short_prompt_never_waits_for_a_long_one(
    server: RunningServer, client: httpx.Client
) -> None:
    long_lane: psutil.Process = server.ring["headrace: tokenizer 2"]
    text = some_words(20_000, 0)
    long_lane.suspend()  # it may take as long as it likes
    try:
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(post, client, "/tokenize", prompt=text)
            for _ in range(3):
                complete(client, {"prompt": "short"})
            assert not long.done()
            long_lane.resume()
            assert long.result()["count"] > 20_000
    finally:
        long_lane.resume()


@pytest.mark.parametrize("number", [100, 40_000])
def test_a_text_has_the_tokens_of_the_reference(
    client: httpx.Client, reference: tokenizers.Tokenizer, number: int
) -> None:
    text = some_words(number, 1)
    right = reference.encode(text).ids
    answer = post(client, "/tokenize", prompt=text)
    assert (answer["count"], answer["tokens"]) == (len(right), right)
    assert post(client, "/detokenize", tokens=right) == {"prompt": text}


def test_a_conversation_has_the_tokens_that_are_generated_from(
    client: httpx.Client, reference: tokenizers.Tokenizer
) -> None:
    message = {"role": "user", "content": "Is <|im_end|> a token? 水"}
    answer = post(client, "/tokenize", messages=[message], return_token_strs=True)
    fields = {"messages": [message], "max_tokens": 1}
    chat = post(client, "/v1/chat/completions", **fields)
    assert answer["count"] == chat["usage"]["prompt_tokens"]
    assert answer["token_strs"] == [reference.id_to_token(id) for id in answer["tokens"]]
    assert answer["token_strs"][:2] == ["<|im_start|>", "system"]


def test_what_is_too_long_by_its_bytes_is_refused_unread(client: httpx.Client) -> None:
    post(client, "/tokenize", prompt=some_words(20_000, 2))  # now the long lane has all loaded
    fields = {"prompt": "x" * 1_000_000, "max_tokens": 1}
    response = client.post("/v1/completions", json=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "8192 tokens; the prompt has at least 12346" in error["message"]
    cut = complete(client, fields | {"truncate_prompt_tokens": 4})
    assert cut[1] == 4
