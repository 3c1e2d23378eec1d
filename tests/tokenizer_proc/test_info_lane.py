"""GETs are answered one by one; event streams stay open until nothing reads them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import FrontendField, TokenizerField
from headrace.config.process_configs import ModelCard, TokenizerConfig
from headrace.ipc.messages import (
    Abort,
    HttpRequest,
    ResponseFrames,
    ToFrontend,
    ToTokenizer,
    first_counter,
    request_id,
)
from headrace.ipc.published_page import METRICS, PublishedPage
from headrace.ipc.sockets import STEP_HIGH_WATER, Inbox, Outbox, address
from headrace.runtime.process import Context
from headrace.tokenizer_proc.info_lane import InfoLane
from headrace.tokenizer_proc.jobs.aborts import Aborts
from headrace.tokenizer_proc.ring import event_streams
from headrace.tokenizer_proc.ring.event_streams import MAX_STREAMS

DEADLINE_MS = 120_000
TIMEOUT_MS = 20  # in which nothing is to come
SEATS = [Seat("frontend", 0), Seat("tokenizer", 0), Seat("tokenizer", 1), Seat("engine", 0)]


class Lane:
    """A lane between a frontend's two ends; its clock goes when it is told to."""

    def __init__(self, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(event_streams.EventStreams.__init__, "__defaults__", (self.time,))
        self.now = 0.0
        self.board = Board.create(SEATS)
        for slot in self.board.slots:
            slot.enter(State.STARTING)
            slot.enter(State.READY)
        self.frontend = self.board.slot("frontend")
        card = ModelCard(
            path="",
            name="tiny",
            max_model_len=128,
            vocab_size=256,
            eos_token_ids=[],
            chat_template=None,
            special_tokens={},
        )
        config = TokenizerConfig(
            run_dir=run_dir,
            cards=(card,),
            num_frontends=1,
            num_detokenizers=1,
            seed=0,
            started_at=77,
            num_tokenizers=1,
            max_batch_size=32,
            batch_wait_ms=2,
        )
        where = address(run_dir, "tokenizer", 1)
        inbox: Inbox[ToTokenizer] = Inbox(where, ToTokenizer)
        seat = SEATS[2]
        context = Context(seat, self.board, self.board.slot("tokenizer", 1), "info", 1)
        self._answers: Inbox[ToFrontend] = Inbox(address(run_dir, "frontend"), ToFrontend)
        aborts = Aborts(run_dir, 1, self.time)
        self.lane = InfoLane(config, context, inbox, aborts)
        self._requests = Outbox(where)
        self._aborts = Outbox(address(run_dir, "aborts", 1))
        ends = (inbox, aborts, self.lane, self._answers, self._requests, self._aborts)
        self.close = lambda: [end.close() for end in ends]
        self._count = 0

    def time(self) -> float:
        return self.now

    def ask(self, path: str, method: str = "GET", start: int = 1) -> int:
        """Send a request by the process of the frontend that is the `start`-th in its seat."""
        self._count += 1
        id = request_id(0, first_counter(start) + self._count)
        self._requests.send(HttpRequest(id, method, path, 1.0), b"")
        tokenizer = self.board.slot("tokenizer", 1)
        num_handled = tokenizer[TokenizerField.HANDLED]
        while tokenizer[TokenizerField.HANDLED] == num_handled:
            self.lane.handle(DEADLINE_MS)
        return id

    def abort(self, id: int) -> None:
        self._aborts.send(Abort(id))

    def pass_a_second(self) -> None:
        self.now += 1.0
        self.lane.handle(0)

    def answered(self) -> tuple[ResponseFrames, bytes]:
        received = self._answers.receive(DEADLINE_MS)
        assert received is not None
        assert isinstance(received[0], ResponseFrames)
        return received[0], bytes(received[1])

    def is_silent(self) -> bool:
        return self._answers.receive(TIMEOUT_MS) is None


@pytest.fixture
def lane(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    made = Lane(str(socket_folder), monkeypatch)
    yield made
    made.close()


def events_of(data: bytes) -> list[tuple[str, Any]]:
    """Return the names and data of server-sent events."""
    found = []
    for event in data.decode().strip().split("\n\n"):
        first, second = event.split("\n")
        found.append((first.removeprefix("event: "), json.loads(second.removeprefix("data: "))))
    return found


def test_ring_is_answered_whole(lane: Lane) -> None:
    id = lane.ask("/ring")
    frames, body = lane.answered()
    assert (frames.heads[id].status, list(frames.last)) == (200, [True])
    assert json.loads(body)["frontends"][0]["state"] == "ready"


def test_metrics_are_published_while_tokenizers_are_behind(lane: Lane, socket_folder: Path) -> None:
    page = PublishedPage(str(socket_folder), METRICS)
    lane.pass_a_second()
    assert page.read(DEADLINE_MS) is None
    lane.frontend[FrontendField.FORWARDED_BYTES] = 1
    lane.pass_a_second()
    published = page.read(DEADLINE_MS)
    assert published is not None
    lane.ask("/metrics")
    assert published.body.splitlines()[:2] == lane.answered()[1].splitlines()[:2]


def test_events_come_every_second_until_the_client_leaves(lane: Lane) -> None:
    id = lane.ask("/ring/events")
    frames, data = lane.answered()
    assert frames.heads[id].content_type == "text/event-stream"
    assert list(frames.last) == [False]
    assert [name for name, _ in events_of(data)] == ["history", "ring"]
    lane.pass_a_second()
    frames, data = lane.answered()
    assert (frames.heads, list(frames.last)) == ({}, [False])
    ((name, state),) = events_of(data)
    assert (name, state["type"], state["model"]) == ("ring", "ring", "tiny")
    assert lane.is_silent(), "one a second"
    lane.abort(id)
    while len(lane.lane._streams):
        lane.pass_a_second()
    while not lane.is_silent():
        pass
    lane.pass_a_second()
    assert lane.is_silent()


def test_streams_share_an_event(lane: Lane) -> None:
    ids = []
    for _ in range(3):
        ids.append(lane.ask("/ring/events"))
        lane.answered()
    lane.pass_a_second()
    frames, data = lane.answered()
    assert list(memoryview(frames.ids).cast("Q")) == ids
    (length,) = set(memoryview(frames.lengths).cast("I"))
    assert data == data[:length] * 3


def test_a_stream_ends_where_its_frontend_waits_for_it(lane: Lane) -> None:
    for field in (FrontendField.IS_CLOSED, FrontendField.IS_LEAVING):
        lane.ask("/ring/events")
        lane.answered()
        lane.frontend[field] = 1
        lane.pass_a_second()
        frames, _ = lane.answered()
        assert list(frames.last) == [True]
        lane.frontend[field] = 0
        lane.pass_a_second()
        assert lane.is_silent()


def test_a_stream_ends_with_its_frontend(lane: Lane) -> None:
    lane.ask("/ring/events")
    lane.answered()
    lane.frontend.enter(State.STARTING)
    lane.frontend.enter(State.READY)
    lane.pass_a_second()
    assert lane.is_silent()
    lane.ask("/ring/events", start=2)
    lane.answered()
    lane.pass_a_second()
    lane.answered()


def test_head_of_the_events_opens_no_stream(lane: Lane) -> None:
    id = lane.ask("/ring/events", "HEAD")
    frames, data = lane.answered()
    assert (frames.heads[id].status, data, list(frames.last)) == (200, b"", [False, True])
    lane.pass_a_second()
    assert lane.is_silent()


def test_there_is_an_end_to_the_number_of_streams(lane: Lane) -> None:
    for _ in range(MAX_STREAMS):
        lane.ask("/ring/events")
        lane.answered()
    id = lane.ask("/ring/events")
    frames, body = lane.answered()
    assert (frames.heads[id].status, list(frames.last)) == (503, [True])
    assert f"{MAX_STREAMS} clients" in json.loads(body)["error"]["message"]


def test_a_frontend_that_does_not_keep_up_misses_events(lane: Lane) -> None:
    lane.ask("/ring/events")
    lane.answered()
    for _ in range(2 * STEP_HIGH_WATER):
        lane.pass_a_second()  # nothing is taken: it would wait for ever
    for _ in range(STEP_HIGH_WATER - 1):
        lane.answered()
    assert lane.is_silent()
