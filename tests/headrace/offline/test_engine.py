"""The engine within a program, on a ring that is played: no model, but real links."""

import asyncio
import base64
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from peers import EVENTS, USAGE, Object, PlayedRing, event

from headrace.client.responses import ChatMessage
from headrace.config.config import ServerConfig
from headrace.errors import ApiError, ConfigError, EngineDied
from headrace.ipc.messages import HttpRequest, RenewLeases
from headrace.ipc.router import Router
from headrace.launch.embedded import RingFailed
from headrace.offline import ring_connection as ring_module
from headrace.offline.engine import AsyncEngine, Engine, embedded_config
from headrace.offline.requests import (
    completion_calls,
    conversation_list,
    params_list,
    prompt_list,
    stream_call,
)
from headrace.offline.sampling_params import SamplingParams
from headrace.tokenizer_proc.requests.sampling import SamplingFields

T = TypeVar("T")
DEADLINE_S = 120
QUIET_MS = 50  # so long is waited for what must not come
MAX_NUM_SEQS = 2
PLACES = 2 * MAX_NUM_SEQS
DEATH = "worker 0 was killed by SIGKILL"


@pytest.fixture
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PlayedRing]]:
    """The rings that engines have started: one, in most tests."""
    played: list[PlayedRing] = []

    def start(config: ServerConfig) -> PlayedRing:
        run_dir = tmp_path / str(len(played))
        run_dir.mkdir()
        played.append(PlayedRing(config, run_dir))
        return played[-1]

    monkeypatch.setattr(ring_module, "EmbeddedServer", start)
    yield played
    assert all(one.is_stopped.is_set() for one in played), "every ring is stopped"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def engine(rings: list[PlayedRing], threads: ThreadPoolExecutor) -> Iterator[Engine]:
    """An engine that ends before the threads that wait for it."""
    with Engine("a/model", max_num_seqs=MAX_NUM_SEQS) as made:
        yield made


@pytest.fixture
def ring(engine: Engine, rings: list[PlayedRing]) -> PlayedRing:
    return rings[0]


def completed(ring: PlayedRing, running: "Future[T]", text_of: Callable[[Object], str]) -> T:
    """Complete what comes until a call returns; return its result."""
    while not running.done():
        if (received := ring.next_request(QUIET_MS)) is not None:
            ring.complete(received[0], text_of(received[1]))
    return running.result()


def test_outputs_are_in_the_order_of_their_prompts(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    prompts: list[Any] = ["a", [1, 2], "c"]
    running = threads.submit(engine.generate, prompts, SamplingParams(max_tokens=4))
    requests = [ring.request() for _ in prompts]
    for request, body in reversed(requests):
        assert (request.method, request.path) == ("POST", "/v1/completions")
        ring.complete(request, f"after {body['prompt']}")
    outputs = running.result(DEADLINE_S)
    assert [output.prompt for output in outputs] == prompts
    assert [output.text for output in outputs] == ["after a", "after [1, 2]", "after c"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
    assert outputs[0].usage.completion_tokens == 2
    assert requests[0][1] == {"prompt": "a", "stream": False, "max_tokens": 4}


def test_one_prompt_makes_a_list_of_one_output(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    for prompt in ("a", [1, 2]):
        running = threads.submit(engine.generate, prompt)
        request, body = ring.request()
        assert body == {"prompt": prompt, "stream": False}
        ring.complete(request, "x", "y")
        (output,) = running.result(DEADLINE_S)
        assert [choice.text for choice in output.outputs] == ["x", "y"]
    assert engine.generate([]) == []


def test_prompts_have_own_parameters_below_call_options(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    params = [SamplingParams(seed=1, temperature=0), SamplingParams(seed=2)]
    running = threads.submit(engine.generate, ["a", "b"], params, temperature=0.5, echo=True)
    bodies = []
    for _ in params:
        request, body = ring.request()
        bodies.append(body)
        ring.complete(request, "")
    running.result(DEADLINE_S)
    shared = {"temperature": 0.5, "echo": True, "stream": False}
    assert bodies == [
        {"prompt": "a", "seed": 1} | shared,
        {"prompt": "b", "seed": 2} | shared,
    ]


@pytest.mark.parametrize(("n", "width"), [(None, PLACES), (2, PLACES // 2), (100, 1)])
def test_as_many_requests_are_out_as_there_are_places(
    n: int | None, width: int, engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    prompts = [str(i) for i in range(3 * PLACES)]
    running = threads.submit(engine.generate, prompts, SamplingParams(n=n))
    out = [ring.request() for _ in range(width)]
    assert ring.next_request(QUIET_MS) is None
    ring.complete(out[0][0], "0")
    out.append(ring.request())  # the next request takes the free place
    assert out[-1][1]["prompt"] == str(width)
    for request, body in out[1:]:
        ring.complete(request, body["prompt"])
    outputs = completed(ring, running, lambda body: str(body["prompt"]))
    assert [output.text for output in outputs] == prompts


def test_calls_of_several_threads_share_the_places(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    calls = [threads.submit(engine.generate, [c] * PLACES) for c in "abc"]
    out = [ring.request() for _ in range(PLACES)]
    assert ring.next_request(QUIET_MS) is None
    for request, body in out:
        ring.complete(request, body["prompt"])
    for call, c in zip(calls, "abc", strict=True):
        texts = [output.text for output in completed(ring, call, lambda body: str(body["prompt"]))]
        assert texts == [c] * PLACES


def test_what_a_full_link_refuses_is_sent_later(
    engine: Engine,
    ring: PlayedRing,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals = iter([False] * 3)
    forward = Router.forward
    monkeypatch.setattr(
        Router, "forward", lambda self, *args: next(refusals, True) and forward(self, *args)
    )
    outputs = completed(ring, threads.submit(engine.generate, ["a", "b"]), lambda _: "x")
    assert [output.text for output in outputs] == ["x", "x"]


def test_a_refusal_names_its_prompt_and_gives_up_the_others(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    running = threads.submit(engine.generate, ["a", "b", "c"])
    requests = [ring.request()[0] for _ in range(3)]
    ring.refuse(requests[1], "prompt: too long")
    with pytest.raises(ApiError, match="400 invalid_value: prompt: too long") as refused:
        running.result(DEADLINE_S)
    assert refused.value.param == "prompt"
    assert refused.value.__notes__ == ["in request 1, counted from 0"]
    assert {ring.aborted(), ring.aborted()} == {requests[0].id, requests[2].id}


def test_chat_answers_one_conversation_or_many(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    conversations: list[Any] = ["Hi", [{"role": "user", "content": "Ho"}]]
    running = threads.submit(engine.chat, conversations, temperature=0)
    for text in ("Hi", "Ho"):
        request, body = ring.request()
        assert request.path == "/v1/chat/completions"
        messages = [{"role": "user", "content": text}]
        assert body == {"messages": messages, "temperature": 0, "stream": False}
        message = {"role": "assistant", "content": f"{text}!"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        identity = {"id": "x", "created": 5, "model": "tiny"}
        ring.answer(request, identity | {"choices": [choice], "usage": USAGE})
    assert [answer.text for answer in running.result(DEADLINE_S)] == ["Hi!", "Ho!"]


def answer_embedding(ring: PlayedRing, request: HttpRequest, vector: list[float]) -> None:
    data = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    item = {"object": "embedding", "index": 0, "embedding": data}
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    ring.answer(request, {"object": "list", "data": [item], "model": "tiny", "usage": usage})


def test_embed_returns_a_row_for_each_text(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    running = threads.submit(engine.embed, ["a", "b"], dimensions=3)
    for text, vector in (("a", [1.0, 0.5, -2.0]), ("b", [0.25, 0.0, 1.0])):
        request, body = ring.request()
        assert request.path == "/v1/embeddings"
        assert body == {"input": text, "encoding_format": "base64", "dimensions": 3}
        answer_embedding(ring, request, vector)
    vectors = running.result(DEADLINE_S)
    assert vectors.dtype == "float32"
    assert vectors.tolist() == [[1.0, 0.5, -2.0], [0.25, 0.0, 1.0]]


def test_a_stream_yields_text_as_it_comes(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    texts = engine.stream("a", SamplingParams(seed=3))
    first = threads.submit(next, texts)
    request, body = ring.request()
    assert body == {"prompt": "a", "seed": 3, "stream": True}
    whole = event({"text": " one"})
    ring.send(request, EVENTS, whole[:20], False)  # bytes come as they like
    ring.send(request, None, whole[20:], False)
    assert first.result(DEADLINE_S) == " one"
    ring.send(request, None, event({"text": " two"}) + b"data: [DONE]\n\n", True)
    assert list(texts) == [" two"]


def test_a_streamed_conversation_yields_text(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    running = threads.submit(lambda: list(engine.stream_chat("Hi")))
    request, body = ring.request()
    assert body == {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    data = event({"delta": {"role": "assistant", "content": ""}}) + event(
        {"delta": {"content": "Ho"}}
    )
    ring.send(request, EVENTS, data + b"data: [DONE]\n\n", True)
    assert running.result(DEADLINE_S) == ["Ho"]


def test_a_refused_stream_raises(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    first = threads.submit(next, engine.stream("a"))
    ring.refuse(ring.request()[0], "prompt: empty")
    with pytest.raises(ApiError, match="prompt: empty"):
        first.result(DEADLINE_S)


def test_a_stream_that_is_closed_is_aborted(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    texts = engine.stream("a")
    first = threads.submit(next, texts)
    request, _ = ring.request()
    ring.send(request, EVENTS, event({"text": " one"}), False)
    assert first.result(DEADLINE_S) == " one"
    texts.close()
    assert ring.aborted() == request.id


def test_what_has_ended_is_not_aborted(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    completed(ring, threads.submit(engine.generate, ["a", "b"]), lambda _: "x")
    while (received := ring.engine.receive(QUIET_MS)) is not None:
        assert isinstance(received[0], RenewLeases)


def test_death_of_a_process_ends_calls_that_wait_and_later_ones(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    running = threads.submit(engine.generate, ["a", "b"])
    first = threads.submit(next, engine.stream("c"))
    for _ in range(3):
        ring.request()
    ring.report(RingFailed(DEATH))
    for waiting in (running, first):
        with pytest.raises(EngineDied, match=DEATH):
            waiting.result(DEADLINE_S)
    with pytest.raises(EngineDied, match=DEATH):
        engine.generate("d")


def test_a_supervisor_that_ends_without_a_word_is_an_error_too(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    running = threads.submit(engine.generate, "a")
    ring.request()
    ring.supervisor.shutdown(2)
    with pytest.raises(EngineDied, match="the supervisor exited with 7"):
        running.result(DEADLINE_S)


def test_shutdown_ends_calls_of_other_threads(
    engine: Engine, ring: PlayedRing, threads: ThreadPoolExecutor
) -> None:
    running = threads.submit(engine.generate, ["a"] * 100)
    ring.request()
    engine.shutdown()
    assert ring.is_stopped.is_set()
    for call in (running, threads.submit(engine.generate, "b")):
        with pytest.raises(EngineDied, match="shut down"):
            call.result(DEADLINE_S)
    engine.shutdown()  # again, and nothing happens


def test_unreferenced_engine_is_shut_down(rings: list[PlayedRing]) -> None:
    engine = Engine("a/model")
    assert not rings[0].is_stopped.is_set()
    del engine
    assert rings[0].is_stopped.is_set()


def test_a_ring_that_fails_to_start_is_stopped(
    rings: list[PlayedRing], monkeypatch: pytest.MonkeyPatch
) -> None:
    def report_failure(self: PlayedRing, _report: object) -> None:
        self.supervisor.send(
            msgspec.msgpack.encode(RingFailed("engine 0 exited with 3 (no memory)"))
        )

    monkeypatch.setattr(PlayedRing, "report", report_failure)
    with pytest.raises(EngineDied, match="no memory"):
        Engine("a/model")
    assert rings[0].is_stopped.is_set()


def test_many_prompts_have_a_bar(
    engine: Engine,
    ring: PlayedRing,
    threads: ThreadPoolExecutor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown(prompts: list[str], use_tqdm: bool) -> str:
        completed(ring, threads.submit(engine.generate, prompts, use_tqdm=use_tqdm), lambda _: "x")
        return capsys.readouterr().err

    bar = shown(["a"] * 9, True)
    assert "9/9" in bar
    assert "tokens/s" in bar
    assert shown(["a"] * 9, False) == shown(["a"], True) == ""


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Play the ring without holding up the loop."""
    return await asyncio.wait_for(asyncio.to_thread(function, *args), DEADLINE_S)


async def test_async_calls_wait_side_by_side(rings: list[PlayedRing]) -> None:
    async with AsyncEngine("a/model") as engine:
        calls = [asyncio.create_task(engine.generate(prompt)) for prompt in "ab"]
        requests = [await in_thread(rings[0].request) for _ in calls]
        for request, body in reversed(requests):
            rings[0].complete(request, f"after {body['prompt']}")
        texts = [(await call)[0].text for call in calls]
    assert texts == ["after a", "after b"]


async def test_async_embed_and_chat(rings: list[PlayedRing]) -> None:
    async with AsyncEngine("a/model") as engine:
        call = asyncio.create_task(engine.embed("a"))
        request, _ = await in_thread(rings[0].request)
        answer_embedding(rings[0], request, [1.0, 2.0])
        assert (await call).tolist() == [[1.0, 2.0]]
        chat = asyncio.create_task(engine.chat("Hi"))
        request, _ = await in_thread(rings[0].request)
        rings[0].refuse(request, "messages: no")
        with pytest.raises(ApiError, match="messages: no"):
            await chat


async def test_async_stream_yields_text_and_is_aborted_when_closed(
    rings: list[PlayedRing],
) -> None:
    async with AsyncEngine("a/model") as engine:
        texts = engine.stream("a")
        first = asyncio.ensure_future(anext(texts))
        request, _ = await in_thread(rings[0].request)
        rings[0].send(request, EVENTS, event({"text": " one"}), False)
        assert await first == " one"
        await texts.aclose()
        assert await in_thread(rings[0].aborted) == request.id


async def test_a_cancelled_task_gives_up_its_requests(rings: list[PlayedRing]) -> None:
    async with AsyncEngine("a/model") as engine:
        call = asyncio.create_task(engine.generate(["a", "b"]))
        requests = [(await in_thread(rings[0].request))[0].id for _ in range(2)]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert sorted([await in_thread(rings[0].aborted) for _ in range(2)]) == requests


async def test_async_death_and_shutdown_are_errors(rings: list[PlayedRing]) -> None:
    engine = AsyncEngine("a/model")
    with pytest.raises(EngineDied, match="not been started"):
        await engine.generate("a")
    await engine.shutdown()  # of what has not been started: nothing
    await engine.start()
    call = asyncio.create_task(engine.generate("a"))
    await in_thread(rings[0].request)
    rings[0].report(RingFailed(DEATH))
    with pytest.raises(EngineDied, match=DEATH):
        await call
    await engine.shutdown()


async def test_a_start_that_is_cancelled_leaves_no_ring(
    rings: list[PlayedRing], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    receive = PlayedRing.receive

    def receive_later(self: PlayedRing) -> Any:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return receive(self)

    monkeypatch.setattr(PlayedRing, "receive", receive_later)
    starting = asyncio.create_task(AsyncEngine("a/model").start())
    await in_thread(begun.wait, DEADLINE_S)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go_on.set()
    assert await in_thread(rings[0].is_stopped.wait, DEADLINE_S)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"port": 1}, "port is a flag of the HTTP server"),
        ({"max_tokens": 1}, "max_tokens is not a flag"),
        ({"tp": 17}, "--tp 17 is too large"),
        ({"dtype": "int3"}, "--dtype int3 is not known; it must be one of auto, "),
    ],
)
@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
def test_flags_that_cannot_work_are_refused(
    kind: type[Engine | AsyncEngine], flags: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        kind("a/model", **flags)


def test_the_model_may_be_a_path() -> None:
    assert embedded_config(Path("/models/x"), {}).model == "/models/x"
    assert embedded_config(None, {}).model is None


def test_forms_of_prompts_and_conversations() -> None:
    assert prompt_list("a") == ["a"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list(["a", [1]]) == ["a", [1]]
    message = {"role": "user", "content": "a"}
    assert conversation_list([message]) == [[message]]
    assert conversation_list([[message], "a"]) == [[message], "a"]
    said = ChatMessage("user", "a")
    assert conversation_list([said]) == [[said]]
    assert prompt_list([]) == conversation_list([]) == []


@pytest.mark.parametrize("prompts", [None, 5, b"a", {"a"}, {"prompt": "a"}, iter("a")])
def test_what_is_no_prompt_is_named(prompts: Any) -> None:
    name = type(prompts).__name__
    for listed in (prompts, ["a", prompts]):
        with pytest.raises(TypeError, match=f"a text or a list of token ids, not {name}"):
            prompt_list(listed)
        with pytest.raises(TypeError, match=f"a text or a list of messages, not {name}"):
            conversation_list(listed)


def test_a_stream_is_of_one_prompt() -> None:
    prompts: Any = ["a", "b"]
    with pytest.raises(TypeError, match="one prompt, not 2; use generate for several"):
        stream_call(prompts, None, {})


def test_parameters_are_one_for_all_or_one_for_each() -> None:
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        params_list([SamplingParams(), SamplingParams()], 3)
    no_params: Any = {"max_tokens": 1}
    for params in (no_params, [no_params]):
        with pytest.raises(TypeError, match=r"sampling_params must be SamplingParams, .* not dict"):
            list(completion_calls(["a"], params, {}))


def test_every_sampling_parameter_is_one_of_the_server() -> None:
    assert set(SamplingParams.__struct_fields__) <= set(SamplingFields.__struct_fields__)


def test_importing_headrace_does_not_import_the_engine() -> None:
    heavy = {"zmq", "torch", "transformers", "tokenizers", "numpy", "tqdm", "httpx"}
    code = (
        f"import sys, headrace; assert not {heavy} & set(sys.modules);"
        "from headrace import AsyncEngine, Engine, RequestOutput, SamplingParams;"
        "assert not {'torch', 'transformers', 'tokenizers', 'httpx'} & set(sys.modules);"
        "assert 'zmq' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
