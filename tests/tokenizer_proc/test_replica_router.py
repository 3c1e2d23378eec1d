"""A request goes where its first token is expected soonest."""

import os
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_card import TINY_CARD

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField, EngineField, Seating, TokenizerField
from headrace.config.process_configs import TokenizerConfig
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.ipc.messages import GenerateRequest, HttpRequest, Sampling, ToEngine, request_id
from headrace.ipc.page_digests import chain_digests
from headrace.ipc.prefix_index import PrefixIndex, create_prefix_index
from headrace.ipc.sockets import Inbox, address
from headrace.storage.slot_file import SlotFile, SlotFileHeader
from headrace.tokenizer_proc.load_queue import RoutedRequest
from headrace.tokenizer_proc.replica_router import (
    ReplicaLoad,
    ReplicaRouter,
    choose,
)

DEADLINE_MS = 120_000
PAGE = 4
REASONS = (
    TokenizerField.PREFIX_ROUTED,
    TokenizerField.LOAD_ROUTED,
    TokenizerField.RESUME_ROUTED,
)
PROMPT = list(range(20))


class Fleet:
    """A tokenizer's router and engines that are played."""

    def __init__(self, run_dir: str, num_engines: int = 3) -> None:
        engines = [Seat("engine", index) for index in range(num_engines)]
        self.board = Board.create([*engines, Seat("tokenizer", 0)])
        self.slots = list(self.board.of("engine"))
        for slot in self.slots:
            slot.enter(State.READY)
            slot[EngineField.PAGE_TOKENS] = PAGE
        fds = {seat.index: (create_prefix_index(), create_prefix_index()) for seat in engines}
        self.demands, demand_fd = os.pipe2(os.O_NONBLOCK)
        self._fds = self.demands, demand_fd
        self.indexes = [PrefixIndex(pool) for pool, _ in fds.values()]
        self.stores = [PrefixIndex(store) for _, store in fds.values()]
        config = TokenizerConfig(
            run_dir=run_dir,
            cards=(TINY_CARD,),
            num_frontends=1,
            num_detokenizers=1,
            seed=0,
            started_at=0,
            num_tokenizers=1,
            max_batch_size=1,
            batch_wait_ms=0,
            prefix_fds=fds,
            demand_fd=demand_fd,
        )
        self.inboxes: list[Inbox[ToEngine]] = [
            Inbox(address(run_dir, "engine", index), ToEngine) for index in range(num_engines)
        ]
        self.slot = self.board.slot("tokenizer")
        self.router = ReplicaRouter(config, self.board, self.slot)
        self._count = 0

    def send(self, prompt: list[int], engine: int = -1) -> int:
        """Send a request; return the engine that gets it."""
        self._count += 1
        id = request_id(0, self._count)
        request = HttpRequest(id, "POST", "/v1/completions", 0.0, engine=engine)
        sequence = GenerateRequest(id, 0, 1, Sampling(), [], b"")
        ids = memoryview(array("I", prompt).tobytes()).cast("I")
        before = self.sent
        assert not self.router.send([RoutedRequest(0, request, [(sequence, ids)])])
        (engine,) = (index for index, num in enumerate(self.sent) if num > before[index])
        received = self.inboxes[engine].receive(DEADLINE_MS)
        assert received is not None
        assert isinstance(received[0], GenerateRequest)
        assert received[0].id == id
        return engine

    @property
    def sent(self) -> list[int]:
        """Tokens sent to each engine."""
        return [self.slot[TokenizerField.SENT_TOKENS + index] for index in range(len(self.slots))]

    def take(self) -> None:
        """Have all engines take what was sent to them."""
        for slot, num in zip(self.slots, self.sent, strict=True):
            slot[EngineField.TAKEN_TOKENS] = num

    def cache(self, engine: int, prompt: list[int]) -> None:
        """Have an engine hold the pages of a prompt."""
        digests: list[bytes] = []
        chain_digests(digests, array("i", prompt), PAGE, len(prompt) // PAGE)
        for digest in digests:
            self.indexes[engine].add(digest)

    def reasons(self) -> list[int]:
        return [self.slot[field] for field in REASONS]

    def close(self) -> None:
        self.router.close()
        for inbox in self.inboxes:
            inbox.close()
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(str(tmp_path))
    yield made
    made.close()


def test_engine_with_the_least_to_compute_is_chosen() -> None:
    loads = [ReplicaLoad(True, 50, 40), ReplicaLoad(True, 20, 0), ReplicaLoad(False, 0, 40)]
    assert choose(loads, 0) == 0, "10 tokens more than its prompt, not 20"
    assert choose([ReplicaLoad(True, 70, 40), *loads[1:]], 0) == 1, "its queue is too long"
    assert choose([ReplicaLoad(False, 9, 0), *loads[2:]], 0) == 1, "none serves"


def test_a_slow_engine_gets_fewer_tokens() -> None:
    fast, slow = ReplicaLoad(True, 500, 0, 1000), ReplicaLoad(True, 100, 0, 250)
    assert choose([fast, slow], 0) == 1, "0.4 s, not 0.5"
    assert choose([fast, replace(slow, num_pending=130)], 0) == 0, "0.52 s"
    assert choose([replace(fast, num_pending=900), replace(slow, num_cached=90)], 0) == 1


def test_tokens_are_shared_by_measured_rates(fleet: Fleet) -> None:
    for slot, rate in zip(fleet.slots, (4000, 2000, 1000), strict=True):
        slot[EngineField.PREFILL_RATE] = rate
    for _ in range(70):
        fleet.send(PROMPT)
    shares = [num / (70 * len(PROMPT)) for num in fleet.sent]
    assert shares == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.03)


@pytest.mark.parametrize("rates", [(0, 0, 0), (900, 900, 900), (1000, 810, 0)])
def test_engines_of_one_rate_or_of_none_yet_take_turns(rates: tuple[int, ...]) -> None:
    loads = [ReplicaLoad(True, 5, 0, rate) for rate in rates]
    assert [choose(loads, first) for first in range(3)] == [0, 1, 2]


def test_an_engine_that_does_not_serve_makes_no_other_slow() -> None:
    loads = [ReplicaLoad(False, 0, 0, 10**9), ReplicaLoad(True, 20, 0, 200)]
    loads.append(ReplicaLoad(True, 9, 0, 100))
    assert choose(loads, 0) == 2


def test_equal_engines_take_turns() -> None:
    loads = [ReplicaLoad(True, 5, 0)] * 3
    assert [choose(loads, first) for first in range(3)] == [0, 1, 2]


def test_requests_that_are_on_their_way_count(fleet: Fleet) -> None:
    assert sorted(fleet.send(PROMPT) for _ in range(3)) == [0, 1, 2]
    assert fleet.reasons() == [0, 3, 0]


def test_prompt_goes_where_its_prefix_is(fleet: Fleet) -> None:
    fleet.cache(1, PROMPT)
    for _ in range(3):
        assert fleet.send([*PROMPT, 7]) == 1
        fleet.take()
    assert fleet.reasons() == [3, 0, 0]
    assert fleet.slot[TokenizerField.ROUTED_CACHED_TOKENS] == 3 * len(PROMPT)


def test_prompt_leaves_its_prefix_where_the_queue_is_longer(fleet: Fleet) -> None:
    fleet.cache(1, PROMPT)
    fleet.slots[1][EngineField.PENDING_TOKENS] = len(PROMPT) + 1
    assert fleet.send([*PROMPT, 7]) != 1
    assert fleet.reasons() == [0, 1, 0]


def test_a_conversation_goes_back_to_the_store_that_has_it(fleet: Fleet) -> None:
    header = SlotFileHeader("pages", "", "", record_bytes=8, num_slots=8)
    fd = os.memfd_create("store")
    store = SlotFile(fd, header, reserves=False)
    store.tell(fleet.stores[2].add, fleet.stores[2].remove)
    pool = PagePool(len(PROMPT) // PAGE, PAGE, index=fleet.indexes[2])
    digests: list[bytes] = []
    chain_digests(digests, array("i", PROMPT), PAGE, len(PROMPT) // PAGE)
    pages = pool.allocate(pool.num_pages)
    for page, digest in zip(pages, digests, strict=True):
        pool.cache(page, digest)
        store.write(digest, memoryview(bytearray(8)))
    pool.free(pages)
    pool.free(pool.allocate(3))
    assert 0 < fleet.indexes[2].count_cached(digests) < len(digests), "some are in the pool"
    for _ in range(3):
        assert fleet.send([*PROMPT, 7]) == 2
        fleet.take()
    assert fleet.slot[TokenizerField.ROUTED_CACHED_TOKENS] == 3 * len(PROMPT)
    pool.free(pool.allocate(pool.num_pages))
    store.erase(digests[0])
    assert {fleet.send([*PROMPT, 7]) for _ in range(3)} == {0, 1, 2}, "its beginning is gone"
    os.close(fd)


def test_resumed_request_goes_to_its_engine_if_that_serves(fleet: Fleet) -> None:
    fleet.slots[2][EngineField.PENDING_TOKENS] = 1000
    assert fleet.send(PROMPT, engine=2) == 2
    fleet.take()
    fleet.slots[2][CommonField.STATE] = State.DEAD
    assert fleet.send(PROMPT, engine=2) != 2
    assert fleet.reasons() == [0, 1, 1]


def test_an_engine_that_leaves_gets_only_what_it_had(fleet: Fleet) -> None:
    fleet.cache(2, PROMPT)
    fleet.board.seat(fleet.slots[2], Seating.LEAVING)
    assert {fleet.send(PROMPT) for _ in range(4)} == {0, 1}
    assert fleet.send(PROMPT, engine=2) == 2, "the sequences are there"
    fleet.board.seat(fleet.slots[2], Seating.VACANT)
    assert fleet.send(PROMPT, engine=2) != 2
    assert fleet.sent[2] == len(PROMPT)


def test_an_engine_that_leaves_serves_until_another_does(fleet: Fleet) -> None:
    fleet.board.seat(fleet.slots[0], Seating.LEAVING)
    fleet.slots[1][CommonField.STATE] = State.STARTING
    fleet.board.seat(fleet.slots[2], Seating.VACANT)
    assert {fleet.send(PROMPT) for _ in range(3)} == {0}
    fleet.slots[1][CommonField.STATE] = State.READY
    assert {fleet.send(PROMPT) for _ in range(3)} == {1}


def test_the_only_engine_left_gets_all(fleet: Fleet) -> None:
    for slot in fleet.slots[1:]:
        fleet.board.seat(slot, Seating.VACANT)
    fleet.slots[0][EngineField.PENDING_TOKENS] = 1000
    assert {fleet.send(PROMPT) for _ in range(3)} == {0}
    assert fleet.reasons() == [0, 0, 0], "there was no choice"


def test_an_engine_that_left_meanwhile_is_not_chosen(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, add = fleet.slots[0], fleet.slot.add

    def vacate(field: int, amount: int = 1) -> None:
        if field == TokenizerField.SENT_TOKENS:
            fleet.board.seat(slot, Seating.VACANT)
        add(field, amount)

    monkeypatch.setattr(fleet.slot, "add", vacate)
    for other in fleet.slots[1:]:
        other[EngineField.PENDING_TOKENS] = 1000
    assert fleet.send(PROMPT) in (1, 2)
    assert fleet.sent[0] == 0


def routed(number: int, num_sequences: int = 1, **fields: Any) -> RoutedRequest:
    """Return a request of some sequences."""
    id = request_id(0, number)
    ids = memoryview(array("I", PROMPT).tobytes()).cast("I")
    sequences = [
        GenerateRequest(id + place, 0, 1, Sampling(), [], b"") for place in range(num_sequences)
    ]
    request = HttpRequest(id, "POST", "/v1/completions", 0.0, **fields)
    return RoutedRequest(0, request, [(sequence, ids) for sequence in sequences])


def received(fleet: Fleet, engine: int, count: int) -> list[int]:
    """Return the numbers of the next requests that an engine gets."""
    found = [fleet.inboxes[engine].receive(DEADLINE_MS) for _ in range(count)]
    requests = [one[0] for one in found if one is not None]
    return [one.id // request_id(0, 1) for one in requests if isinstance(one, GenerateRequest)]


def vacate(fleet: Fleet) -> None:
    for slot in fleet.slots:
        fleet.board.seat(slot, Seating.VACANT)


def test_requests_wait_in_order_until_an_engine_serves(fleet: Fleet) -> None:
    vacate(fleet)
    assert not fleet.router.send([routed(1), routed(2, 2)])
    assert not fleet.router.send([routed(3)])
    assert fleet.slot[TokenizerField.WAITING] == 4
    fleet.board.seat(fleet.slots[1], Seating.SEATED)
    fleet.slots[1][CommonField.STATE] = State.STARTING
    assert not fleet.router.send_waiting()
    assert fleet.router.are_waiting
    fleet.slots[1][CommonField.STATE] = State.READY
    assert not fleet.router.send([routed(4)])
    ids = [request_id(0, number) for number in (1, 2, 3, 4)]
    assert received(fleet, 1, 5) == [id // ids[0] for id in (ids[0], ids[1], ids[1] + 1, *ids[2:])]
    assert fleet.slot[TokenizerField.WAITING] == 0
    assert not fleet.router.are_waiting


def test_the_first_request_that_waits_wakes_the_supervisor(fleet: Fleet) -> None:
    fleet.router.send([routed(1)])
    with pytest.raises(BlockingIOError):
        os.read(fleet.demands, 1)
    vacate(fleet)
    fleet.router.send([routed(2), routed(3)])
    assert len(os.read(fleet.demands, 8)) == 1


def test_a_refused_request_wakes_no_supervisor(fleet: Fleet) -> None:
    vacate(fleet)
    fleet.slots[1][EngineField.RETRY_NS] = time.monotonic_ns() + 10**12
    assert len(fleet.router.send([routed(1)])) == 1
    with pytest.raises(BlockingIOError):
        os.read(fleet.demands, 1)


def test_a_model_that_is_unloaded_gets_only_what_it_had(fleet: Fleet) -> None:
    vacate(fleet)
    fleet.board.seat(fleet.slots[2], Seating.LEAVING)
    assert not fleet.router.send([routed(1), routed(2, engine=2)])
    assert received(fleet, 2, 1) == [request_id(0, 2) // request_id(0, 1)]
    assert fleet.slot[TokenizerField.WAITING] == 1


def test_too_many_waiting_requests_are_refused(fleet: Fleet) -> None:
    vacate(fleet)
    first, second, third = (routed(number, 2) for number in (1, 2, 3))
    fleet.router._waiting._limits = (3,)
    assert not fleet.router.send([first, second])
    (refusal,) = fleet.router.send([third, routed(4, resumes=1)])
    assert refusal.routed is third
    assert refusal.error.status == 429
    assert fleet.slot[TokenizerField.WAITING] == 5, "one that was accepted before waits"


def test_waiting_requests_whose_clients_leave_are_dropped(fleet: Fleet) -> None:
    vacate(fleet)
    fleet.router.send([routed(1), routed(2)])
    fleet.router.drop(lambda id: id == request_id(0, 1))
    assert fleet.slot[TokenizerField.WAITING] == 1
    fleet.board.seat(fleet.slots[0], Seating.SEATED)
    fleet.router.send_waiting()
    assert received(fleet, 0, 1) == [request_id(0, 2) // request_id(0, 1)]


def test_requests_for_a_model_that_failed_are_refused(fleet: Fleet) -> None:
    vacate(fleet)
    fleet.slots[1].last_death.record(1, "exited with status 4")
    fleet.slots[1][EngineField.RETRY_NS] = time.monotonic_ns() + 10**12
    (refusal,) = fleet.router.send([routed(1)])
    assert refusal.error.status == 503
    assert "exited with status 4; it is tried again after 1000 s" in str(refusal.error)
    assert dict(refusal.error.headers)["retry-after"] == "1000"
    fleet.slots[1][EngineField.RETRY_NS] = time.monotonic_ns()
    assert not fleet.router.send([routed(1)]), "it is time"


@pytest.mark.parametrize("is_open", [True, False])
def test_requests_to_a_remote_engine_pass_its_seat_by(fleet: Fleet, is_open: bool) -> None:
    taken = list[Any]()

    class Link:
        def send(self, prompts: list[Any]) -> bool:
            taken.extend(prompts if is_open else [])
            return is_open

        def close(self) -> None: ...

    links: Any = dict.fromkeys(range(3), Link())
    fleet.router._remote = links
    request = HttpRequest(request_id(0, 1), "POST", "/v1/completions", 0.0)
    sequence = GenerateRequest(request.id, 0, 1, Sampling(), [], b"")
    ids = memoryview(array("I", PROMPT).tobytes()).cast("I")
    fleet.router.send([RoutedRequest(0, request, [(sequence, ids)])])
    (engine,) = (index for index, num in enumerate(fleet.sent) if num)
    by_seat = fleet.inboxes[engine].receive(0 if is_open else DEADLINE_MS)
    assert (by_seat is None, taken == [(sequence, ids)]) == (is_open, is_open)
