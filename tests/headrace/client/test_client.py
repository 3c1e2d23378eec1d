"""The client library against a server that is a function."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

import headrace
from headrace.client.client import AsyncClient, Client
from headrace.client.responses import (
    ChatCompletion,
    Completion,
    EventParser,
    PromptToken,
    TextLogprobs,
)
from headrace.errors import ApiError

IDENTITY = {"id": "x-1", "created": 5, "model": "tiny", "system_fingerprint": None}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
CHAT = IDENTITY | {
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Paris.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": USAGE,
}
TEXT = IDENTITY | {
    "object": "text_completion",
    "choices": [{"index": 0, "text": " 4, 5", "logprobs": None, "finish_reason": "length"}],
    "usage": USAGE,
}
REFUSAL = {
    "error": {
        "message": "top_p: must be above 0",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": "invalid_value",
    }
}
# U+2028 and U+0085 end a line for str.splitlines, but not in an event stream.
PIECES = ["Par", "is\u2028", "\x85is", " it 🦊"]


def chat_events(pieces: list[str]) -> list[dict[str, Any]]:
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in pieces]
    deltas += [{}]
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    return [IDENTITY | {"choices": choice} for choice in [*choices, []]]


def text_events(pieces: list[str]) -> list[dict[str, Any]]:
    return [
        IDENTITY | {"choices": [{"index": 0, "text": piece, "finish_reason": None}]}
        for piece in pieces
    ]


def sse(events: list[dict[str, Any]], end: bytes = b"data: [DONE]\n\n") -> bytes:
    data = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events]
    return b"".join(data) + end


class Dribble(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A response body that comes one byte at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        for byte in self._data:
            yield bytes([byte])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for byte in self._data:
            yield bytes([byte])


class Server:
    """Gives one response to everything and keeps what it was asked."""

    def __init__(self, response: Callable[[], httpx.Response]) -> None:
        self._response = response
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self._response()

    @property
    def path(self) -> str:
        return self.requests[-1].url.path

    @property
    def body(self) -> Any:
        return json.loads(self.requests[-1].content)


def serving(body: object, status: int = 200) -> Server:
    return Server(lambda: httpx.Response(status, json=body))


def streaming(data: bytes) -> Server:
    return Server(lambda: httpx.Response(200, stream=Dribble(data)))


def connect(server: Server, api_key: str | None = None) -> Client:
    return Client(api_key=api_key, transport=httpx.MockTransport(server))


def connect_async(server: Server) -> AsyncClient:
    return AsyncClient(transport=httpx.MockTransport(server))


def test_chat_sends_messages_and_options_and_returns_the_answer() -> None:
    server = serving(CHAT)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with connect(server) as client:
        answer = client.chat(messages, temperature=0, top_k=5)
    assert server.path == "/v1/chat/completions"
    assert server.body == {"messages": messages, "temperature": 0, "top_k": 5}
    assert isinstance(answer, ChatCompletion)
    assert (answer.text, answer.choices[0].finish_reason) == ("Paris.", "stop")
    assert answer.usage.total_tokens == 5


def test_logprobs_of_a_chat_are_read() -> None:
    top = {"token": " Paris", "logprob": -0.25, "bytes": list(b" Paris")}
    logprobs = {"content": [top | {"top_logprobs": [top]}], "refusal": None}
    choice = CHAT["choices"][0] | {"logprobs": logprobs}
    prompt = [None, {"5": {"logprob": -2.0, "rank": 3, "decoded_token": "Hi"}}]
    server = serving(CHAT | {"choices": [choice], "prompt_logprobs": prompt})
    with connect(server) as client:
        answer = client.chat("Hi", logprobs=True, top_logprobs=1, prompt_logprobs=0)
    read = answer.choices[0].logprobs
    assert read is not None
    assert (read.content[0].logprob, read.content[0].top_logprobs[0].token) == (-0.25, " Paris")
    assert answer.prompt_logprobs == [None, {5: PromptToken(-2.0, 3, "Hi")}]


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_tool_calls_and_reasoning_go_into_the_next_request() -> None:
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    choice = {"message": message | {"tool_calls": [CALL]}, "finish_reason": "tool_calls"}
    server = serving(CHAT | {"choices": [CHAT["choices"][0] | choice]})
    with connect(server) as client:
        answer = client.chat("Hi", tools=[])
        (call,) = answer.tool_calls
        assert (call.id, call.function.name, call.function.arguments) == ("c1", "f", '{"a": 1}')
        told = answer.choices[0].message
        assert (told.reasoning_content, answer.text) == ("Hm", "")
        result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        client.chat([told, result])
    again = {"role": "assistant", "tool_calls": [CALL]}
    assert server.body["messages"] == [again | {"reasoning_content": "Hm"}, result]


CALL_DELTAS: list[dict[str, Any]] = [
    {"reasoning_content": "Hm"},
    {"content": "So"},
    {"tool_calls": [{"index": 0, **CALL, "function": {"name": "f", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
]


async def test_stream_yields_tool_calls_and_reasoning_on_request() -> None:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in CALL_DELTAS]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    data = sse([IDENTITY | {"choices": [choice]} for choice in choices])
    with connect(streaming(data)) as client:
        chunks = [chunk.choices[0] for chunk in client.stream_chat_chunks("Hi")]
    async with connect_async(streaming(data)) as client:
        assert [c.choices[0] async for c in client.stream_chat_chunks("Hi")] == chunks
    deltas = [chunk.delta for chunk in chunks]
    assert (deltas[0].reasoning_content, deltas[1].content) == ("Hm", "So")
    (begin,), (more,) = deltas[2].tool_calls, deltas[3].tool_calls
    assert (begin.index, begin.id, begin.function.name) == (0, "c1", "f")
    assert more.function.arguments == '{"a": 1}'
    assert chunks[4].finish_reason == "tool_calls"
    with connect(streaming(data)) as client:
        assert list(client.stream_chat("Hi")) == ["So"]


def test_logprobs_of_a_completion_are_read() -> None:
    logprobs = {
        "tokens": ["1", "2"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"2": -0.5}],
        "text_offset": [0, 1],
    }
    with connect(serving(TEXT | {"choices": [TEXT["choices"][0] | {"logprobs": logprobs}]})) as c:
        answer = c.complete("1", logprobs=1, echo=True)
    assert answer.choices[0].logprobs == TextLogprobs(**logprobs)


def test_a_string_is_what_the_user_says() -> None:
    server = serving(CHAT)
    with connect(server) as client:
        client.chat("Hi")
    assert server.body == {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("prompt", ["1, 2, 3,", ["a", "b"], [1, 2], [[1], [2]]])
def test_complete_takes_every_form_of_prompt(prompt: Any) -> None:
    server = serving(TEXT)
    with connect(server) as client:
        answer = client.complete(prompt, max_tokens=4)
    assert server.path == "/v1/completions"
    assert server.body == {"prompt": prompt, "max_tokens": 4}
    assert isinstance(answer, Completion)
    assert (answer.text, answer.choices[0].finish_reason) == (" 4, 5", "length")


def test_a_streamed_chat_yields_the_text_as_it_comes() -> None:
    server = streaming(sse(chat_events(PIECES)))
    with connect(server) as client:
        assert list(client.stream_chat("Hi", seed=1)) == PIECES
    assert server.body == {
        "messages": [{"role": "user", "content": "Hi"}],
        "seed": 1,
        "stream": True,
    }


def test_a_streamed_completion_yields_the_text_as_it_comes() -> None:
    server = streaming(sse(text_events([*PIECES, ""])))
    with connect(server) as client:
        assert list(client.stream_complete("Hi")) == PIECES
    assert server.body == {"prompt": "Hi", "stream": True}


def test_a_stream_closed_early_closes_its_response() -> None:
    server = streaming(sse(chat_events(PIECES)))
    with connect(server) as client:
        stream = client.stream_chat("Hi")
        assert next(stream) == PIECES[0]
        stream.close()
        assert list(stream) == []


def test_a_refusal_carries_status_code_param_and_message() -> None:
    with connect(serving(REFUSAL, 400)) as client, pytest.raises(ApiError) as refused:
        client.chat("Hi", top_p=0)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "invalid_value", "top_p")
    assert error.message == "top_p: must be above 0"
    assert str(error) == "400 invalid_value: top_p: must be above 0"


def test_a_refused_stream_raises_before_any_text() -> None:
    with connect(serving(REFUSAL, 400)) as client, pytest.raises(ApiError, match="top_p"):
        next(client.stream_chat("Hi"))


def test_stream_error_is_raised_after_the_text_before_it() -> None:
    stream = sse([*chat_events(PIECES[:1])[:2], REFUSAL], end=b"")
    texts = []
    with connect(streaming(stream)) as client, pytest.raises(ApiError, match="must be above 0"):
        for text in client.stream_chat("Hi"):
            texts.append(text)
    assert texts == PIECES[:1]


def test_a_stream_that_is_cut_is_an_error() -> None:
    stream = sse(chat_events(PIECES), end=b"")
    with connect(streaming(stream)) as client, pytest.raises(ApiError) as cut:
        list(client.stream_chat("Hi"))
    assert cut.value.code == "stream_cut"


@pytest.mark.parametrize(
    ("body", "message"), [(b"Bad Gateway", "Bad Gateway"), (b"", "HTTP status 502"), (b"\xff", "�")]
)
def test_an_error_of_another_shape_is_reported_as_it_is(body: bytes, message: str) -> None:
    server = Server(lambda: httpx.Response(502, content=body))
    with connect(server) as client, pytest.raises(ApiError) as refused:
        client.models()
    assert (refused.value.status, refused.value.message) == (502, message)


def test_an_answer_of_another_server_is_an_error() -> None:
    with connect(serving({"hello": "world"})) as client, pytest.raises(ApiError, match="Headrace"):
        client.chat("Hi")


RANKING = IDENTITY | {
    "results": [{"index": 1, "relevance_score": 0.5, "document": {"text": "b"}}],
    "usage": USAGE,
}
SCORES = IDENTITY | {"data": [{"index": 0, "object": "score", "score": 0.25}], "usage": USAGE}
TOKENS = {"count": 2, "max_model_len": 9, "tokens": [5, 6], "token_strs": None}


def test_rerank_and_score_return_similarities() -> None:
    server = serving(RANKING)
    with connect(server) as client:
        (best,) = client.rerank("q", ("a", "b"), top_n=1).results
    assert (server.path, server.body) == (
        "/v1/rerank",
        {"query": "q", "documents": ["a", "b"], "top_n": 1},
    )
    assert (best.index, best.relevance_score) == (1, 0.5)
    server = serving(SCORES)
    with connect(server) as client:
        assert client.score("a", ["b"]).data[0].score == 0.25
    assert (server.path, server.body) == ("/v1/score", {"text_1": "a", "text_2": ["b"]})


def test_texts_and_conversations_are_tokenized_and_back() -> None:
    server = serving(TOKENS)
    messages = [{"role": "user", "content": "Hi"}]
    with connect(server) as client:
        assert client.tokenize("Hi", add_special_tokens=False).tokens == [5, 6]
        assert server.body == {"prompt": "Hi", "add_special_tokens": False}
        client.tokenize(messages)
        assert (server.path, server.body) == ("/tokenize", {"messages": messages})
    server = serving({"prompt": "Hi"})
    with connect(server) as client:
        assert client.detokenize((5, 6)) == "Hi"
    assert (server.path, server.body) == ("/detokenize", {"tokens": [5, 6]})


async def test_async_has_all_of_them_too() -> None:
    async with connect_async(serving(RANKING)) as client:
        assert (await client.rerank("q", ["a"])).results[0].index == 1
    async with connect_async(serving(SCORES)) as client:
        assert (await client.score("a", "b")).data[0].index == 0
    async with connect_async(serving(TOKENS)) as client:
        assert (await client.tokenize("Hi")).count == 2
    async with connect_async(serving({"prompt": "Hi"})) as client:
        assert await client.detokenize([5]) == "Hi"
    async with connect_async(serving({"version": "1"})) as client:
        assert await client.version() == "1"


class Busy(Server):
    """Refuses twice, then gives its response."""

    def __init__(
        self, response: Callable[[], httpx.Response], status: int = 429, after: str = "7"
    ) -> None:
        super().__init__(response)
        self._refusal = (status, {"retry-after": after})

    def __call__(self, request: httpx.Request) -> httpx.Response:
        super().__call__(request)
        if len(self.requests) > 2:
            return self._response()
        status, headers = self._refusal
        return httpx.Response(status, json=REFUSAL, headers=headers)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the clients slept, which takes no time."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("headrace.client.client.time.sleep", waits.append)
    monkeypatch.setattr("headrace.client.client.asyncio.sleep", sleep)
    monkeypatch.setattr(
        "headrace.client.cancellation.CancelScope.wait",
        lambda _line, seconds: waits.append(seconds),
    )
    return waits


@pytest.mark.parametrize("status", [429, 503])
def test_busy_server_is_retried_after_retry_after(status: int, slept: list[float]) -> None:
    server = Busy(lambda: httpx.Response(200, json=CHAT), status)
    with connect(server) as client:
        assert client.chat("Hi").text == "Paris."
    assert (slept, len(server.requests)) == ([7, 7], 3)
    assert len({request.content for request in server.requests}) == 1


def test_a_stream_is_asked_for_again(slept: list[float]) -> None:
    body = sse(chat_events(PIECES))
    server = Busy(lambda: httpx.Response(200, stream=Dribble(body)))
    with connect(server) as client:
        assert list(client.stream_chat("Hi")) == PIECES
    assert slept == [7, 7]


async def test_async_asks_again_too(slept: list[float]) -> None:
    async with connect_async(Busy(lambda: httpx.Response(200, json=CHAT))) as client:
        assert (await client.chat("Hi")).text == "Paris."
    body = sse(chat_events(PIECES))
    server = Busy(lambda: httpx.Response(200, stream=Dribble(body)))
    async with connect_async(server) as client:
        assert [text async for text in client.stream_chat("Hi")] == PIECES
    assert slept == [7, 7, 7, 7]


def test_long_retry_after_is_not_waited_for(slept: list[float]) -> None:
    server = Busy(lambda: httpx.Response(200, json=CHAT), after="61")
    with connect(server) as client, pytest.raises(ApiError) as refused:
        client.chat("Hi")
    assert (slept, refused.value.retry_after_s) == ([], 61)


def test_retries_come_to_an_end_and_may_be_none(slept: list[float]) -> None:
    server = Server(lambda: httpx.Response(429, json=REFUSAL))
    with connect(server) as client, pytest.raises(ApiError) as refused:
        client.chat("Hi")
    assert (slept, refused.value.retry_after_s) == ([0.5, 1], None)
    busy = Busy(lambda: httpx.Response(200, json=CHAT))
    impatient = Client(max_retries=0, transport=httpx.MockTransport(busy))
    with impatient, pytest.raises(ApiError):
        impatient.chat("Hi")
    assert len(busy.requests) == 1


def test_a_canceled_stream_is_at_its_end() -> None:
    with connect(streaming(sse(chat_events(PIECES)))) as client:
        stream = client.stream_chat("Hi")
        assert next(stream) == PIECES[0]
        stream.cancel()
        assert list(stream) == []
        never = client.stream_chat("Hi")
        never.cancel()
        assert list(never) == []


async def test_an_async_stream_is_canceled_and_closed() -> None:
    server = streaming(sse(chat_events(PIECES)))
    async with connect_async(server) as client:
        stream = client.stream_chat("Hi")
        assert await anext(stream) == PIECES[0]
        stream.cancel()
        assert [text async for text in stream] == []
        other = client.stream_chat("Hi")
        await anext(other)
        await other.aclose()
        assert [text async for text in other] == []
        never = client.stream_chat("Hi")
        never.cancel()
        assert [text async for text in never] == []
    assert len(server.requests) == 2


async def test_calls_may_have_timeouts_of_their_own() -> None:
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json=CHAT)

    transport = httpx.MockTransport(answer)
    with Client(timeout_s=9, transport=transport) as client:
        client.with_options(timeout_s=2).chat("Hi")
        client.with_options(timeout_s=2).with_options(max_retries=0).health()
        client.chat("Hi")
    async with AsyncClient(transport=transport) as client:
        await client.with_options(timeout_s=3).chat("Hi")
        await client.chat("Hi")
    assert asked == [2, 2, 9, 3, 600]


def test_calls_may_have_retries_of_their_own(slept: list[float]) -> None:
    busy = Busy(lambda: httpx.Response(200, json=CHAT))
    with connect(busy) as client:
        with pytest.raises(ApiError):
            client.with_options(max_retries=0).chat("Hi")
        assert (slept, len(busy.requests)) == ([], 1)
        assert client.chat("Hi").text == "Paris."


def test_models_are_listed() -> None:
    model = {"id": "tiny", "object": "model", "created": 5, "owned_by": "headrace"}
    server = serving({"object": "list", "data": [model | {"max_model_len": 128}]})
    with connect(server) as client:
        (found,) = client.models()
    assert server.path == "/v1/models"
    assert (found.id, found.max_model_len) == ("tiny", 128)


COUNTS = {"model": "a b", "replicas": 3, "ready": 1, "leaving": 0, "max_replicas": 16}


def test_replicas_are_asked_for_and_told() -> None:
    server = serving(COUNTS, status=202)
    with connect(server) as client:
        assert client.scale(3).ready == 1
        assert (server.path, server.requests[-1].url.query) == ("/admin/replicas", b"replicas=3")
        client.scale(2, model="a b")
        assert server.requests[-1].url.query == b"replicas=2&model=a+b"
    with connect(serving({"models": [COUNTS]})) as client:
        assert [each.max_replicas for each in client.replicas()] == [16]


def test_caches_of_images_are_reset() -> None:
    server = serving({"accepted": []})
    with connect(server) as client:
        client.reset_mm_cache()
        client.reset_encoder_cache()
    asked = [(request.method, request.url.path) for request in server.requests]
    assert asked == [("POST", "/reset_mm_cache"), ("POST", "/reset_encoder_cache")]


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_health_is_the_status(status: int, healthy: bool) -> None:
    with connect(Server(lambda: httpx.Response(status))) as client:
        assert client.health() is healthy


def test_the_api_key_goes_with_every_request() -> None:
    server = serving(CHAT)
    with connect(server, api_key="secret") as client:
        client.chat("Hi")
    with connect(server) as client:
        client.chat("Hi")
    sent = [request.headers.get("authorization") for request in server.requests]
    assert sent == ["Bearer secret", None]


def test_a_closed_client_asks_no_more() -> None:
    with connect(serving(CHAT)) as client:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        client.chat("Hi")


async def test_async_chat_returns_the_answer() -> None:
    server = serving(CHAT)
    async with connect_async(server) as client:
        assert (await client.chat("Hi", n=1)).text == "Paris."
    assert server.body == {"messages": [{"role": "user", "content": "Hi"}], "n": 1}


async def test_async_complete_returns_the_continuation() -> None:
    async with connect_async(serving(TEXT)) as client:
        assert (await client.complete([1, 2])).text == " 4, 5"


async def test_async_streams_yield_the_text_as_it_comes() -> None:
    async with connect_async(streaming(sse(chat_events(PIECES)))) as client:
        assert [text async for text in client.stream_chat("Hi")] == PIECES
    async with connect_async(streaming(sse(text_events(PIECES)))) as client:
        assert [text async for text in client.stream_complete("Hi")] == PIECES


async def test_async_errors_are_raised_too() -> None:
    async with connect_async(serving(REFUSAL, 400)) as client:
        with pytest.raises(ApiError, match="top_p"):
            await client.complete("Hi", top_p=0)
        with pytest.raises(ApiError, match="top_p"):
            await anext(client.stream_chat("Hi"))
    async with connect_async(streaming(sse(chat_events(PIECES), end=b""))) as client:
        with pytest.raises(ApiError, match="ended before"):
            [text async for text in client.stream_chat("Hi")]


async def test_async_models_and_health() -> None:
    async with connect_async(serving({"data": []})) as client:
        assert await client.models() == []
        assert await client.health()
    async with connect_async(serving(COUNTS, status=202)) as client:
        assert (await client.scale(3)).replicas == 3
        await client.reset_mm_cache()
        await client.reset_encoder_cache()
    async with connect_async(serving({"models": []})) as client:
        assert await client.replicas() == []


def test_events_may_end_lines_as_windows_does_and_hold_comments() -> None:
    parser = EventParser()
    data = b": hello\r\nevent: x\r\ndata: {}\r\n\r\ndata:{}\n\ndata: [DONE]\n\n"
    assert list(parser.feed(data)) == ["{}", "{}"]
    parser.check_end()


def test_importing_headrace_imports_no_other_package() -> None:
    code = (
        "import importlib, sys, typing; before = set(sys.modules); import headrace;"
        "assert set(sys.modules) - before == {'headrace'};"
        "from headrace import ApiError, AsyncClient, Client; assert 'httpx' in sys.modules;"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_headrace_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        _ = headrace.Cleint
