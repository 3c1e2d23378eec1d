"""Scripted answers travel the ring: clients see them as a model's, from streams to usage."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from headrace.errors import ConfigError
from headrace.testing import (
    Delay,
    Malformed,
    MockError,
    MockReply,
    MockToolCall,
    ScriptedServer,
    ScriptRule,
    Words,
)

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedServer]:
    """A mock of the demo model."""
    with ScriptedServer(args=["--max-body-bytes", str(1 << 20)]) as server:
        yield server


@pytest.fixture
def scripted(running: ScriptedServer) -> ScriptedServer:
    """The same, as a test finds it."""
    running.reset()
    return running


@pytest.fixture
def client(scripted: ScriptedServer) -> Iterator[openai.OpenAI]:
    """A client that asks once."""
    key = scripted.api_key
    with openai.OpenAI(base_url=scripted.base_url, api_key=key, max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, text: str = "Hello", **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="gpt-x", messages=messages, **fields)


def test_server_without_a_script_says_words(
    scripted: ScriptedServer, client: openai.OpenAI
) -> None:
    answer = ask(client, max_tokens=5)
    assert (answer.model, answer.choices[0].finish_reason) == ("gpt-x", "length")
    assert len(answer.choices[0].message.content.split()) == 5
    assert [request.model for request in scripted.requests] == ["gpt-x"]


def test_usage_counts_the_text_and_its_end(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    text = "Ich heiße Åse 🙂, so to speak."
    scripted.script([MockReply(text), MockReply(text), Words(20), Words(20), Words(20)])
    answer = ask(client)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
    assert answer.usage.completion_tokens == scripted.num_tokens(text) + 1
    pieces = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].usage == answer.usage
    said = [choice.delta.content or "" for piece in pieces for choice in piece.choices]
    assert "".join(said) == text
    assert len(said) > 5
    drawn = [ask(client, seed=seed) for seed in (1, 1, 2)]
    assert [answer.usage.completion_tokens for answer in drawn] == [20] * 3
    first, same, other = (answer.choices[0].message.content for answer in drawn)
    assert first == same != other


def test_calls_and_thoughts_reach_the_client(
    scripted: ScriptedServer, client: openai.OpenAI
) -> None:
    call = MockToolCall("get_weather", {"city": "Ås"})
    scripted.script([call, MockReply("So:", "Hm", [call, call])])
    choice = ask(client, tools=[TOOL], tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    (called,) = choice.message.tool_calls
    assert json.loads(called.function.arguments) == {"city": "Ås"}
    message = ask(client, tools=[TOOL]).choices[0].message
    assert (message.content, message.reasoning_content) == ("So:", "Hm")
    assert len(message.tool_calls) == 2


def test_text_ends_at_stops_and_limits(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.script([MockReply("One two three four")], repeat=True)
    cut = ask(client, stop=["three"]).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("One two ", "stop")
    short = ask(client, max_tokens=2).choices[0]
    assert (short.message.content, short.finish_reason) == ("One two", "length")
    both = ask(client, n=2, response_format=SCHEMA).choices
    assert [choice.message.content for choice in both] == ["One two three four"] * 2


def test_errors_are_the_statuses_of_the_script(
    scripted: ScriptedServer, client: openai.OpenAI
) -> None:
    scripted.script(
        [MockError(429, "slow down", retry_after=2), MockError(503), MockError(500, after="On")]
    )
    with pytest.raises(openai.RateLimitError, match="slow down") as limited:
        ask(client)
    assert limited.value.response.headers.get_list("retry-after") == ["2"]
    with pytest.raises(openai.InternalServerError) as overloaded:
        ask(client)
    assert (overloaded.value.status_code, overloaded.value.code) == (503, "overloaded")
    said = ""
    with pytest.raises(openai.APIError, match="the script answers 500"):
        for piece in ask(client, stream=True):
            said += piece.choices[0].delta.content or ""
    assert said == "On"


@pytest.mark.parametrize("stream", [False, True])
def test_cut_response_breaks_the_connection(
    scripted: ScriptedServer, client: openai.OpenAI, stream: bool
) -> None:
    scripted.script([Malformed("cut"), MockReply("Well")])
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": stream}
    with pytest.raises(httpx.RemoteProtocolError, match="without sending complete"):
        httpx.post(f"{scripted.base_url}/chat/completions", json=body)
    assert ask(client).choices[0].message.content == "Well"


def test_malformed_stream_is_no_json_or_has_no_end(
    scripted: ScriptedServer, client: openai.OpenAI
) -> None:
    scripted.script([Malformed("json", "On"), Malformed("no_end"), Malformed("content_type")])
    with pytest.raises(json.JSONDecodeError):
        list(ask(client, stream=True))
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
    answers = [httpx.post(f"{scripted.base_url}/chat/completions", json=body) for _ in range(2)]
    assert "[DONE]" not in answers[0].text
    assert answers[1].headers["content-type"].startswith("text/html")


MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": [{"role": "user", "content": "Hello"}]},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/generate": {"text": ["Hello"]},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_api_says_the_script(scripted: ScriptedServer, path: str) -> None:
    rule = ScriptRule([MockReply("Hi."), MockError(500, "why", after="Hi.")], pattern="^Hello$")
    scripted.script([rule, *(Malformed(kind) for kind in ("json", "no_end", "content_type"))])
    url, body = f"{scripted.url}{path}", {"model": "m", **BODIES[path]}
    assert '"Hi."' in httpx.post(url, json=body).text
    text = httpx.post(url, json=body | {"stream": True}).text
    assert "Hi" in text
    assert '"why"' in text
    for _ in range(3):
        assert httpx.post(url, json=body | {"stream": True}).text.startswith(("data: ", "event: "))
    assert [request.body for request in scripted.requests][:1] == [body]


def test_rules_choose_by_message_model_and_key(
    scripted: ScriptedServer, client: openai.OpenAI
) -> None:
    scripted.script(
        [
            ScriptRule([MockReply("wet")], contains="rain", repeat=True),
            ScriptRule([MockReply("keyed")], api_key="secret", repeat=True),
            MockReply("else"),
        ]
    )
    asked = ["Hello", "Will it rain?"]
    assert [ask(client, text).choices[0].message.content for text in asked] == ["else", "wet"]
    other = client.with_options(api_key="secret")
    assert ask(other).choices[0].message.content == "keyed"
    with pytest.raises(openai.BadRequestError, match=r"no answer left.*'Hello'"):
        ask(client)
    assert scripted.num_left == 0
    assert [request.messages[-1]["content"] for request in scripted.requests][:2] == asked


def test_long_prompt_gets_the_next_answer(scripted: ScriptedServer, client: openai.OpenAI) -> None:
    scripted.script([MockReply("one"), MockReply("two"), MockReply("three")])
    texts = ["short", "x" * (70 << 10), "short"]
    said = [ask(client.with_options(timeout=120), text) for text in texts[:1]]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(client, texts[1] * 4)
    said.append(ask(client, texts[2]))
    assert [answer.choices[0].message.content for answer in said] == ["one", "two"]
    assert len(scripted.requests) == 3


def test_delays_come_before_and_between_tokens(
    scripted: ScriptedServer, client: openai.OpenAI
) -> None:
    scripted.script([Delay(0.2, MockReply("One two three"), token_interval=0.05)])
    began = time.monotonic()
    pieces = ask(client, stream=True)
    next(pieces)
    assert time.monotonic() - began >= 0.2
    assert len(list(pieces)) > 3
    assert time.monotonic() - began >= 0.2 + 3 * 0.05


def test_request_that_is_refused_uses_no_answer(
    scripted: ScriptedServer, client: openai.OpenAI
) -> None:
    scripted.script([MockToolCall("get_weather"), MockReply("left")])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="the request offers no tools"):
        ask(client)
    assert ask(client, tools=[TOOL]).choices[0].message.tool_calls
    assert len(scripted.requests) == 3


def test_wrong_script_is_an_error_of_the_test(scripted: ScriptedServer) -> None:
    with pytest.raises(ValueError, match="one of cut, json, no_end, content_type"):
        Malformed("torn")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the body is not a script.*status"):
        scripted.script([MockError(200)])


def test_scripted_stream_goes_on_after_a_death(
    scripted: ScriptedServer, client: openai.OpenAI
) -> None:
    text = "One two three four five six"
    scripted.script([Delay(0, MockReply(text), token_interval=0.2), MockReply("next")])
    supervisor = psutil.Process(scripted._server._server.process.pid)
    (engine,) = (p for p in supervisor.children() if p.cmdline()[:1] == ["headrace: engine"])
    pieces = ask(client, stream=True)
    said = [next(pieces), next(pieces)]
    engine.kill()
    said += pieces
    assert "".join(piece.choices[0].delta.content or "" for piece in said) == text
    assert ask(client).choices[0].message.content == "next"
    assert len(scripted.requests) == 2


def test_server_of_a_model_takes_no_script() -> None:
    with ScriptedServer(engine="auto") as server:
        server.reset()
        with pytest.raises(ConfigError, match="need the mock engine"):
            server.script([MockReply("Hi")])
        assert httpx.get(f"{server.url}/mock/script").status_code == 404
