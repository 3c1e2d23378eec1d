"""Requests that wait are encoded together, and each comes to its own end."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from byte_encoder import ByteEncoder
from tiny_card import TINY_CARD

from headrace.board.board import Board, Seat, State, Timing
from headrace.board.fields import EngineField, FrontendField, TokenizerField
from headrace.config.process_configs import ModelCard, TokenizerConfig
from headrace.errors import QueueFull, RequestError
from headrace.ipc.messages import (
    Abort,
    GenerateRequest,
    HttpRequest,
    Image,
    Message,
    Sampling,
    ToEngine,
    ToFrontend,
    ToTokenizer,
    request_id,
)
from headrace.ipc.router import HUGE_BODY_BYTES
from headrace.ipc.sockets import Inbox, Outbox, address
from headrace.runtime.process import Context
from headrace.tokenizer_proc import routed_models
from headrace.tokenizer_proc import service as service_module
from headrace.tokenizer_proc.encoding.chat_template import TemplateTooSlow
from headrace.tokenizer_proc.jobs.aborts import Aborts
from headrace.tokenizer_proc.jobs.stages import (
    Body,
    Check,
    Encoding,
    Ids,
    ImmediateResponse,
    Outcome,
    Stages,
    Text,
)
from headrace.tokenizer_proc.load_queue import Refusal, RoutedRequest
from headrace.tokenizer_proc.offload_pool import OffloadPool
from headrace.tokenizer_proc.requests.constraints import Constraint
from headrace.tokenizer_proc.routes import Routes
from headrace.tokenizer_proc.service import Service

DEADLINE_MS = 120_000
PATH = "/v1/completions"


class Recorder(ByteEncoder):
    """Notes what is encoded together; refuses "poison"."""

    def __init__(self, _path: str) -> None:
        self.batches: list[list[str]] = []
        self.look: Callable[[], int] = lambda: 0
        self.seen: list[int] = []  # by `look`, at each batch

    def encode(self, texts: list[Text]) -> list[Ids]:
        self.batches.append([text.text for text in texts])
        self.seen.append(self.look())
        if any(text.text == "poison" for text in texts):
            raise RuntimeError(f"cannot encode {texts[0].text}")
        return super().encode(texts)


class Undecided:
    """Grammars that are looked into until a test says what came of it."""

    def __init__(self, *_: object) -> None:
        self.check: Check[bytes] = Check()
        self.on_found: Callable[[], None] = lambda: None

    def compiled(self, _param: str, _constraint: Constraint) -> Encoding[bytes]:
        yield self.check
        assert self.check.found is not None
        self.on_found()
        return self.check.found


class Offloaded(OffloadPool):
    """Requests that are handled elsewhere until a test says what came of them."""

    def __init__(self, *_: object) -> None:
        self.check: Check[Outcome | RequestError] = Check()
        self.lengths: list[int] = []  # of the bodies
        self.num_left = 0

    def handle(self, _request: HttpRequest, body: Body) -> Stages:
        self.lengths.append(len(body))
        try:
            yield self.check
        finally:
            self.num_left += self.check.found is None
        assert isinstance(self.check.found, ImmediateResponse)
        return self.check.found


class Bench:
    """A service between a frontend and an engine that are played."""

    def __init__(
        self,
        run_dir: str,
        max_batch_size: int = 4,
        max_wait_s: float = 60,
        cards: tuple[ModelCard, ...] = (TINY_CARD,),
    ) -> None:
        config = TokenizerConfig(
            run_dir=run_dir,
            cards=cards,
            num_frontends=1,
            num_detokenizers=1,
            seed=0,
            started_at=0,
            num_tokenizers=1,
            max_batch_size=max_batch_size,
            batch_wait_ms=2,
        )
        engines = [Seat("engine", place) for place, _ in enumerate(cards)]
        board = Board.create([Seat("tokenizer", 0), Seat("frontend", 0), *engines])
        for engine in board.of("engine"):
            engine[EngineField.MODEL] = engine.seat.index
            engine.enter(State.READY)
        self.slot = board.slot("tokenizer")
        context = Context(self.slot.seat, board, self.slot, "info", 0)
        inbox: Inbox[ToTokenizer] = Inbox(address(run_dir, "tokenizer"), ToTokenizer)
        self.told = Aborts(run_dir, 0, clock=itertools.count().__next__)
        self.service = Service(config, context, inbox, self.told, max_batch_size, max_wait_s)
        self.requests = Outbox(address(run_dir, "tokenizer"))
        self.aborts = Outbox(address(run_dir, "aborts"))
        self.engines: list[Inbox[ToEngine]] = [
            Inbox(address(run_dir, "engine", seat.index), ToEngine) for seat in engines
        ]
        self.frontend: Inbox[ToFrontend] = Inbox(address(run_dir, "frontend"), ToFrontend)
        self.inbox = inbox
        self.sent = self.num_bytes = 0

    @property
    def batches(self) -> list[list[str]]:
        return self.batches_of(0)

    def batches_of(self, model: int) -> list[list[str]]:
        encoder = self.service.models[model].encoder
        assert isinstance(encoder, Recorder)
        return encoder.batches

    @property
    def grammars(self) -> Undecided:
        grammars = self.service.models[0].grammars
        assert isinstance(grammars, Undecided)
        return grammars

    def send(self, *prompts: str, suspect: bool = False, **fields: Any) -> None:
        """Send a request for each prompt, as one message, and wait until they have arrived."""
        requests: list[tuple[Message, bytes]] = []
        for prompt in prompts:
            self.sent += 1
            body = msgspec.json.encode({"prompt": prompt} | fields)
            self.num_bytes += len(body) + 1
            id = request_id(0, self.sent)
            requests.append((HttpRequest(id, "POST", PATH, 0.0, is_suspect=suspect), body))
        self.requests.send_all(requests)
        assert self.inbox.wait(DEADLINE_MS)

    def abort(self, *numbers: int) -> None:
        """Let the clients of some requests leave, and wait until that has arrived."""
        self.aborts.send_all([(Abort(request_id(0, number)), b"") for number in numbers])
        assert self.told._inbox.wait(DEADLINE_MS)

    @property
    def offloaded(self) -> Offloaded:
        pool = self.service._offload
        assert isinstance(pool, Offloaded)
        return pool

    def prompts(self, number: int, model: int = 0) -> list[bytes]:
        """Return the next prompts that reach a model's engine, as text."""
        found = [self.engines[model].receive(DEADLINE_MS) for _ in range(number)]
        return [bytes(memoryview(one[1]).cast("I").tolist()[1:]) for one in found if one]

    def close(self) -> None:
        self.service.close()
        self.requests.close()
        self.aborts.close()
        self.told.close()
        for inbox in (*self.engines, self.frontend, self.inbox):
            inbox.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(routed_models, "Encoder", Recorder)
    monkeypatch.setattr(routed_models, "Grammars", Undecided)
    monkeypatch.setattr(service_module, "OffloadPool", Offloaded)
    made = Bench(str(tmp_path))
    yield made
    made.close()


def handle_all(bench: Bench) -> None:
    """Handle what was sent."""
    while bench.slot[TokenizerField.HANDLED] < bench.sent:
        bench.service.handle(DEADLINE_MS)


def test_a_lone_request_goes_at_once(bench: Bench) -> None:
    bench.send("one")
    bench.service.handle(DEADLINE_MS)  # would sit out its 120 s if it waited for others
    assert bench.batches == [["one"]]
    assert bench.prompts(1) == [b"one"]


def test_requests_that_wait_are_encoded_together_up_to_the_limit(bench: Bench) -> None:
    names = [f"prompt {i}" for i in range(9)]
    bench.send(*names)
    handle_all(bench)
    assert [text for batch in bench.batches for text in batch] == names
    assert max(map(len, bench.batches)) <= 4
    assert len(bench.batches) < len(names)
    assert bench.prompts(9) == [name.encode() for name in names]
    assert bench.slot[TokenizerField.PROMPT_TOKENS] == sum(len(name) + 1 for name in names)
    assert sum(bench.slot.histogram(Timing.N).counts) == bench.slot.histogram(Timing.N).sum == 9


def test_a_batch_that_has_waited_goes(bench: Bench) -> None:
    bench.service._max_wait_s = 0
    bench.send("a", "b", "c")
    handle_all(bench)
    assert bench.batches == [["a"], ["b"], ["c"]]


def test_a_request_that_fails_fails_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.send("before", "poison", "after")
    handle_all(bench)
    assert bench.prompts(2) == [b"before", b"after"]
    received = bench.frontend.receive(DEADLINE_MS)
    assert received is not None
    frames, body = received
    (head,) = frames.heads.values()
    assert [id for id, *_ in frames.split(body)] == [request_id(0, 2)]
    assert head.status == 500
    assert msgspec.json.decode(body)["error"]["code"] == "internal_error"
    assert " failed: RuntimeError" in caplog.text
    assert caplog.records[-1].__dict__["fields"]["exception"].startswith("  File ")
    assert "poison" not in caplog.text, "no text of requests is in the log"


def test_suspects_are_handled_alone_and_named_meanwhile(bench: Bench) -> None:
    encoder = bench.service.models[0].encoder
    assert isinstance(encoder, Recorder)
    encoder.look = lambda: bench.slot[TokenizerField.AT_HAND]
    bench.send("one", "two")
    bench.send("mean", "also mean", suspect=True)
    handle_all(bench)
    assert bench.batches[-2:] == [["mean"], ["also mean"]]
    assert encoder.seen[-2:] == [request_id(0, 3), request_id(0, 4)]
    assert not any(encoder.seen[:-2])
    assert bench.slot[TokenizerField.AT_HAND] == 0
    assert sorted(bench.prompts(4)) == [b"also mean", b"mean", b"one", b"two"]


def test_lost_messages_are_written_off_when_idle(bench: Bench) -> None:
    frontend = bench.service._backlog._senders[0]
    frontend.add(FrontendField.FORWARDED_BYTES, 1000)
    bench.service.handle(0)
    assert bench.slot[TokenizerField.HANDLED_BYTES] == 0, "it may still come"
    bench.service.handle(0)
    assert bench.slot[TokenizerField.HANDLED_BYTES] == 1000


def test_a_request_may_want_texts_twice(bench: Bench) -> None:
    bench.send("text", bad_words=["no"])
    handle_all(bench)
    assert bench.batches == [["text"], ["no", " no"]]
    received = bench.engines[0].receive(DEADLINE_MS)
    assert received is not None
    request = received[0]
    assert request.sampling.bad_words == [list(b"no"), list(b" no")]  # type: ignore[union-attr]


def test_request_waiting_for_its_grammar_delays_no_other(bench: Bench) -> None:
    bench.send("slow", guided_regex="a")
    bench.service.handle(DEADLINE_MS)
    bench.send("other")
    while bench.slot[TokenizerField.HANDLED] < 1:
        bench.service.handle(DEADLINE_MS)
    assert bench.prompts(1) == [b"other"]
    bench.service.handle(DEADLINE_MS)  # would sit out its 120 s if it did not look again
    assert bench.slot[TokenizerField.HANDLED] == 1
    bench.grammars.check.found = b"grammar"
    bench.service.handle(DEADLINE_MS)
    received = bench.engines[0].receive(DEADLINE_MS)
    assert received is not None
    assert received[0].grammar == b"grammar"  # type: ignore[union-attr]
    assert bench.slot[TokenizerField.HANDLED] == 2


def test_long_body_overtakes_a_huge_one(bench: Bench) -> None:
    huge, long = "x" * HUGE_BODY_BYTES, "y" * 75_000
    bench.send(huge, long, truncate_prompt_tokens=5)
    while bench.slot[TokenizerField.HANDLED] < 1:
        bench.service.handle(DEADLINE_MS)
    assert bench.prompts(1) == [b"yyyy"]
    assert [length >= HUGE_BODY_BYTES for length in bench.offloaded.lengths] == [True]
    bench.offloaded.check.found = ImmediateResponse(413, b"{}")
    bench.service.handle(DEADLINE_MS)
    received = bench.frontend.receive(DEADLINE_MS)
    assert received is not None
    assert [head.status for head in received[0].heads.values()] == [413]
    assert bench.slot[TokenizerField.HANDLED_BYTES] == bench.num_bytes


def test_huge_body_whose_client_leaves_is_let_go(bench: Bench) -> None:
    bench.send("x" * HUGE_BODY_BYTES)
    bench.service.handle(DEADLINE_MS)
    bench.abort(1)
    bench.service.handle(0)
    assert bench.offloaded.num_left == 1
    assert bench.slot[TokenizerField.ABANDONED] == 1


def test_slow_template_delays_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_slow(_routes: Routes, request: HttpRequest, _body: Body) -> Stages:
        if request.id == request_id(0, 1):
            raise TemplateTooSlow("messages: the template takes too long", "messages")
        yield [Text("other", add_special_tokens=False)]
        return ImmediateResponse(200, b"{}")

    monkeypatch.setattr(Routes, "handle", is_slow)
    bench.send("slow", "other")
    while bench.slot[TokenizerField.HANDLED] < 1:
        bench.service.handle(DEADLINE_MS)
    assert (len(bench.offloaded.lengths), bench.batches) == (1, [["other"]])


def test_a_batch_has_gone_on_before_another_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_models, "Encoder", Recorder)
    monkeypatch.setattr(routed_models, "Grammars", Undecided)
    bench = Bench(str(tmp_path), max_batch_size=1)
    bench.send("one", "two", guided_regex="a")
    while len(bench.batches) < 2:
        bench.service.handle(DEADLINE_MS)
    arrived: list[list[bytes]] = []
    bench.grammars.on_found = lambda: arrived.append(bench.prompts(min(1, len(arrived))))
    bench.grammars.check.found = b"grammar"
    bench.service.handle(DEADLINE_MS)
    assert arrived == [[], [b"one"]], "what one needs may be in the way of the next"
    assert bench.prompts(1) == [b"two"]
    bench.close()


def test_what_is_abandoned_while_it_waits_is_not_even_parsed(bench: Bench) -> None:
    bench.send("one")
    bench.send("refused", max_tokens="many")
    bench.send("two", "three")
    bench.abort(2, 3)
    handle_all(bench)
    assert [text for batch in bench.batches for text in batch] == ["one", "three"]
    assert bench.prompts(2) == [b"one", b"three"]
    assert bench.slot[TokenizerField.ABANDONED] == 2
    assert bench.slot[TokenizerField.REFUSED] == 0
    assert bench.slot[TokenizerField.HANDLED_BYTES] == bench.num_bytes
    assert bench.frontend.receive(0) is None


def test_an_abort_may_overtake_its_request(bench: Bench) -> None:
    bench.abort(1)
    assert not bench.service.handle(0)
    bench.send("one", "two")
    handle_all(bench)
    assert [text for batch in bench.batches for text in batch] == ["two"]


def test_what_is_abandoned_between_two_stages_ends_there(bench: Bench) -> None:
    encoder = bench.service.models[0].encoder
    assert isinstance(encoder, Recorder)
    bench.send("text", bad_words=["no"])
    encoder.look = lambda: bench.abort(1) or 0
    handle_all(bench)
    assert bench.batches == [["text"]]
    assert bench.slot[TokenizerField.ABANDONED] == 1
    assert bench.engines[0].receive(0) is None


def test_what_the_engine_is_about_to_get_goes_there(bench: Bench) -> None:
    encoder = bench.service.models[0].encoder
    assert isinstance(encoder, Recorder)
    bench.send("text")
    encoder.look = lambda: bench.abort(1) or 0
    handle_all(bench)
    assert bench.prompts(1) == [b"text"]
    assert (bench.slot[TokenizerField.HANDLED], bench.slot[TokenizerField.ABANDONED]) == (1, 0)
    assert not bench.service.handle(0)


def test_what_is_abandoned_while_it_is_aside_is_let_go(bench: Bench) -> None:
    bench.send("slow", guided_regex="a")
    bench.service.handle(DEADLINE_MS)
    bench.service.handle(0)
    assert bench.slot[TokenizerField.HANDLED] == 0
    bench.abort(1)
    bench.service.handle(0)
    assert (bench.slot[TokenizerField.HANDLED], bench.slot[TokenizerField.ABANDONED]) == (1, 1)
    assert bench.slot[TokenizerField.HANDLED_BYTES] == bench.num_bytes
    bench.grammars.check.found = b"grammar"
    assert not bench.service.handle(0)
    assert bench.engines[0].receive(0) is None


def test_a_suspect_that_is_abandoned_is_one_no_more(bench: Bench) -> None:
    bench.send("mean", "also mean", suspect=True)
    bench.abort(1)
    handle_all(bench)
    assert bench.batches == [["also mean"]]
    assert bench.slot[TokenizerField.AT_HAND] == 0


def test_backlog_of_others_survives_abandoned_requests(
    bench: Bench,
) -> None:
    frontend = bench.service._backlog._senders[0]
    frontend.add(FrontendField.FORWARDED_BYTES, 1000)
    bench.send("one")
    bench.abort(1)
    assert bench.service.handle(DEADLINE_MS)
    assert bench.slot[TokenizerField.HANDLED_BYTES] == bench.num_bytes


def test_images_of_a_refused_request_are_taken_back(bench: Bench) -> None:
    taken_back: list[Image] = []
    bench.service._images = cast("Any", SimpleNamespace(take_back=taken_back.extend))
    images = [Image(key, 0, 1, 1, {}) for key in (b"a", b"b")]
    ids = memoryview(b"").cast("I")
    prompts = [(GenerateRequest(0, 0, 1, Sampling(), [], b"", images=images), ids)] * 2
    routed = RoutedRequest(0, HttpRequest(request_id(0, 1), "POST", PATH, 0.0), prompts)
    bench.service._refuse([Refusal(routed, QueueFull())])
    assert taken_back == images * 2, "once for each sequence"
    assert bench.frontend.receive(DEADLINE_MS) is not None


def test_request_goes_to_the_model_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fake in (("Encoder", Recorder), ("Grammars", Undecided)):
        monkeypatch.setattr(routed_models, name, fake)
    monkeypatch.setattr(service_module, "OffloadPool", Offloaded)
    bench = Bench(str(tmp_path), cards=(TINY_CARD, dataclasses.replace(TINY_CARD, name="other")))
    bench.send("one", "two", model="other")
    bench.send("three", model="tiny")
    bench.send("four")  # the first one's
    bench.send("five", model="none")
    handle_all(bench)
    assert (bench.batches_of(0), bench.batches_of(1)) == ([["three", "four"]], [["one", "two"]])
    assert (bench.prompts(2), bench.prompts(2, 1)) == ([b"three", b"four"], [b"one", b"two"])
    received = bench.frontend.receive(DEADLINE_MS)
    assert received is not None
    assert b"the model 'none' does not exist; this server has 'tiny', 'other'" in bytes(received[1])
    bench.close()
