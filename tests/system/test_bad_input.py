"""Whatever comes, the answer is a clear 4xx in OpenAI's shape, and the server goes on."""

import json

import httpx
import pytest
from servers import RunningServer

USER = {"role": "user", "content": "x"}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"Content-Type": "application/json"}
EMBED = "/v1/embeddings"


def body(**fields: object) -> bytes:
    """Return a chat body with `fields` added."""
    return json.dumps({"messages": [USER], "max_tokens": 1} | fields).encode()


CASES: dict[str, tuple[str, bytes, int, str]] = {
    "empty body": (CHAT, b"", 400, "not valid JSON"),
    "broken JSON": (CHAT, b'{"messages": [', 400, "not valid JSON"),
    "not an object": (CHAT, b"[1, 2]", 400, "object"),
    "NaN temperature": (CHAT, body(temperature=float("nan")), 400, "not valid JSON"),
    "huge number": (CHAT, b'{"messages": [], "temperature": 1e999}', 400, "temperature"),
    "huge integer": (CHAT, body(seed=10**30), 400, "seed"),
    "deep nesting": (CHAT, b'{"tools": ' + b"[" * 100_000, 400, ""),
    "invalid UTF-8": (
        CHAT,
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        400,
        "not valid UTF-8",
    ),
    "lone surrogate": (
        CHAT,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        400,
        "surrogate pair",
    ),
    "no messages field": (CHAT, b"{}", 400, "messages"),
    "empty messages": (CHAT, b'{"messages": []}', 400, "messages"),
    "messages of a wrong type": (CHAT, b'{"messages": "hello"}', 400, "messages"),
    "message without a role": (CHAT, b'{"messages": [{"content": "x"}]}', 400, "role"),
    "null content": (CHAT, b'{"messages": [{"role": "user", "content": null}]}', 400, "content"),
    "an image": (
        CHAT,
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
        400,
        "image_url",
    ),
    "unknown model": (CHAT, body(model="gpt-4"), 404, "gpt-4"),
    "negative max_tokens": (CHAT, body(max_tokens=-1), 400, "max_tokens"),
    "zero max_tokens": (CHAT, body(max_tokens=0), 400, "max_tokens"),
    "text for a number": (CHAT, body(max_tokens="ten"), 400, "max_tokens"),
    "negative temperature": (CHAT, body(temperature=-0.1), 400, "temperature"),
    "top_p of zero": (CHAT, body(top_p=0), 400, "top_p"),
    "top_k too low": (CHAT, body(top_k=-2), 400, "top_k"),
    "n of zero": (CHAT, body(n=0), 400, "n"),
    "n too high": (CHAT, body(n=10_000), 400, "n"),
    "empty stop string": (CHAT, body(stop=[""]), 400, "stop"),
    "stop of a wrong type": (CHAT, body(stop=[1]), 400, "stop"),
    "stop_token_ids out of range": (CHAT, body(stop_token_ids=[-1]), 400, "stop_token_ids"),
    "stream_options without stream": (CHAT, body(stream_options={}), 400, "stream_options"),
    "prompt past the context": (
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": "word " * 20_000}]}).encode(),
        400,
        "8192 tokens",
    ),
    "too many logprobs": (CHAT, body(logprobs=True, top_logprobs=21), 400, "between 0 and 20"),
    "logprobs unasked for": (CHAT, body(top_logprobs=2), 400, "'logprobs': true"),
    "bias of no token": (CHAT, body(logit_bias={"49152": 1}), 400, "49152"),
    "bias too large": (CHAT, body(logit_bias={"5": 101}), 400, "-100 and 100"),
    "penalty too large": (CHAT, body(presence_penalty=3), 400, "between -2 and 2"),
    "no repetition penalty": (CHAT, body(repetition_penalty=0), 400, "above 0"),
    "min_p too large": (CHAT, body(min_p=2), 400, "between 0 and 1"),
    "empty bad word": (CHAT, body(bad_words=[""]), 400, "bad_words"),
    "more tokens than there may be": (
        CHAT,
        body(min_tokens=9, max_tokens=8),
        400,
        "must be at most 8",
    ),
    "embeddings of a text model": (EMBED, b'{"input": "x"}', 400, "has no embeddings"),
    "best_of below n": (TEXT, b'{"prompt": "x", "best_of": 1, "n": 2}', 400, "at least n"),
    "best_of in a stream": (
        TEXT,
        b'{"prompt": "x", "best_of": 2, "stream": true}',
        400,
        "best_of",
    ),
    "too many candidates": (TEXT, b'{"prompt": "x", "best_of": 129}', 400, "between 1 and 128"),
    "too many logprobs of a text": (TEXT, b'{"prompt": "x", "logprobs": 21}', 400, "0 and 20"),
    "too many prompt_logprobs": (CHAT, body(prompt_logprobs=21), 400, "between 0 and 20"),
    "prompt_logprobs in a stream": (
        CHAT,
        body(prompt_logprobs=1, stream=True),
        400,
        "prompt_logprobs",
    ),
    "bias of a word": (CHAT, body(logit_bias={"word": 1}), 400, "'word' is not a token id"),
    "bias of an endless id": (CHAT, body(logit_bias={"9" * 5000: 1}), 400, "not a token id"),
    "too many biases": (
        CHAT,
        body(logit_bias={str(id): 1 for id in range(1025)}),
        400,
        "at most 1024 entries, not 1025",
    ),
    "repetition penalty past f32": (CHAT, body(repetition_penalty=1e300), 400, "at most 2"),
    "frequency penalty too low": (CHAT, body(frequency_penalty=-2.5), 400, "-2 and 2, not -2.5"),
    "negative min_tokens": (CHAT, body(min_tokens=-1), 400, "min_tokens"),
    "endless stop string": (CHAT, body(stop="x" * 100_000), 400, "1 to 1000 characters"),
    "too many bad words": (CHAT, body(bad_words=["x"] * 129), 400, "at most 128"),
    "too many stop tokens": (CHAT, body(stop_token_ids=[1] * 257), 400, "at most 256"),
    "stop token past the vocabulary": (CHAT, body(stop_token_ids=[49152]), 400, "to 49151"),
    "nothing left of the prompt": (CHAT, body(truncate_prompt_tokens=0), 400, "at least 1"),
    "priority past its range": (CHAT, body(priority=2**31), 400, "priority"),
    "priority in words": (CHAT, body(priority="high"), 400, "priority"),
    "salt of a wrong type": (CHAT, body(cache_salt=5), 400, "cache_salt"),
    "tools": (CHAT, body(tools=[{"type": "function"}]), 400, "tools"),
    "format of no kind": (CHAT, body(response_format={"type": "xml"}), 400, "response_format"),
    "keyword that is not followed": (CHAT, body(guided_json={"not": {}}), 400, "guided_json: not"),
    "regex of a wrong form": (CHAT, body(guided_regex="("), 400, "a group is not closed"),
    "two grammars": (TEXT, b'{"prompt": "a", "regex": "a", "ebnf": "b"}', 400, "only one"),
    "no prompt": (TEXT, b"{}", 400, "prompt"),
    "prompt of a wrong type": (TEXT, b'{"prompt": {"a": 1}}', 400, "prompt"),
    "prompt of mixed types": (TEXT, b'{"prompt": ["a", 1]}', 400, "prompt"),
    "empty prompt": (TEXT, b'{"prompt": ""}', 400, "prompt"),
    "empty prompt list": (TEXT, b'{"prompt": []}', 400, "prompt"),
    "empty prompt in a list": (TEXT, b'{"prompt": [[]]}', 400, "prompt"),
    "token id out of range": (TEXT, b'{"prompt": [1, 49152]}', 400, "49152"),
    "negative token id": (TEXT, b'{"prompt": [-1]}', 400, "-1"),
    "50 MB body": (TEXT, b'{"prompt": "' + b"x" * 50_000_000 + b'"}', 413, "max-body-bytes"),
    "unknown path": ("/v1/nothing", b"{}", 404, "/v1/nothing"),
    "wrong method": ("/v1/models", b"{}", 405, "GET"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_gets_a_clear_4xx(server: RunningServer, name: str) -> None:
    path, content, status, says = CASES[name]
    response = httpx.post(f"{server.url}{path}", content=content, headers=JSON)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_chunked_50_mb_body_is_refused_before_its_end(server: RunningServer) -> None:
    def chunks() -> "list[bytes]":
        return [b"x" * 1_000_000] * 50

    try:
        response = httpx.post(f"{server.url}{TEXT}", content=iter(chunks()), headers=JSON)
    except httpx.WriteError:
        return  # closed while the client was still sending
    assert response.status_code == 413


def test_unknown_fields_are_ignored(server: RunningServer) -> None:
    content = body(surprise={"a": [1]}, user="me", metadata={}, store=False, temperature=0)
    response = httpx.post(f"{server.url}{CHAT}", content=content, headers=JSON)
    assert response.status_code == 200, response.text


def test_error_of_a_wrong_type_names_the_field(server: RunningServer) -> None:
    response = httpx.post(f"{server.url}{CHAT}", content=body(max_tokens="ten"), headers=JSON)
    assert response.json()["error"] == {
        "message": "max_tokens: must be an integer or null, not a string",
        "type": "invalid_request_error",
        "param": "max_tokens",
        "code": "invalid_body",
    }


def test_model_and_version_are_reported(server: RunningServer) -> None:
    models = httpx.get(f"{server.url}/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["SmolLM2-135M-Instruct"]
    one = httpx.get(f"{server.url}/v1/models/SmolLM2-135M-Instruct").json()
    assert one == models["data"][0]
    assert set(httpx.get(f"{server.url}/version").json()) == {"version"}
