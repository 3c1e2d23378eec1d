"""Chooses the engine of a request among those of its model, and sends it there.

That is the engine that computes soonest what comes before the first token of the response. Those
are the tokens of other sequences, and those of the prompt that neither its prefix cache nor the
memory of its KV store has. The time for them is by the rate that the engine has measured of itself.
What tokenizers have sent counts at once, by counters on the board. All sequences of a request go to
one engine.

An engine that leaves its seat gets no new requests. It ends once it has taken all that is counted
as sent to it. So a request is counted first, and its engine chosen anew where that has left.
Requests wait here while no engine of their model serves.
"""

import itertools
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

from headrace.board.backlog import engine_backlog
from headrace.board.board import Board, Slot, State
from headrace.board.fields import CommonField, EngineField, Seating, TokenizerField
from headrace.board.model_status import last_failure
from headrace.config.process_configs import TokenizerConfig
from headrace.errors import ModelNotLoaded, QueueFull
from headrace.ipc.engine_links import EngineLinks
from headrace.ipc.messages import GenerateRequest, HttpRequest
from headrace.ipc.page_digests import chain_digests
from headrace.ipc.prefix_index import PrefixIndex
from headrace.runtime.session_link import SessionLink
from headrace.tokenizer_proc.jobs.stages import Ids
from headrace.tokenizer_proc.load_queue import LoadQueue, Refusal, RoutedRequest

Prompts = list[tuple[GenerateRequest, Ids]]  # of one request
Parcels = defaultdict[int, Prompts]  # what goes to each engine


@dataclass(frozen=True)
class ReplicaLoad:
    """An engine, to a request."""

    is_ready: bool
    num_pending: int  # tokens that it computes for others and, without a cache, for the request
    num_cached: int  # tokens of the prompts in its prefix cache
    prefill_rate: int = 0  # tokens per second, as it has measured; 0 before it has


def choose(loads: Sequence[ReplicaLoad], first: int) -> int:
    """Return the index of the engine that has computed the prompts soonest.

    Args:
        first: of equals, the one that comes first from here on is chosen.
    """
    fastest = max(load.prefill_rate * load.is_ready for load in loads)

    def cost(index: int) -> tuple[bool, int, int]:
        load = loads[index]
        num_tokens = load.num_pending - load.num_cached
        turn = (index - first) % len(loads)
        return not load.is_ready, num_tokens * slowness(load.prefill_rate, fastest), turn

    return min(range(len(loads)), key=cost)


def slowness(rate: int, fastest: int) -> int:
    """Return how many halves of the fastest engine's time another takes, 2 at least.

    Rates of equal engines differ by the steps they are of. So those that are within a quarter are
    equal. An engine without a rate counts as the fastest: its next prompt tells.
    """
    return max(2, round(2 * fastest / rate)) if rate else 2


class ReplicaRouter:
    """The links of a tokenizer to all engines. A request goes to one of its model's."""

    def __init__(self, config: TokenizerConfig, board: Board, slot: Slot) -> None:
        self._slot = slot
        self._engines = list(board.of("engine"))
        self._links = EngineLinks(config.run_dir, board, slot.beat)
        self._remote = {
            engine: SessionLink(config.run_dir, remote, self._engines[engine])
            for engine, remote in config.remote_engines.items()
        }
        self._backlogs = [engine_backlog(board, i) for i in range(len(self._engines))]
        self._indexes = {
            engine: [PrefixIndex(fd) for fd in fds] for engine, fds in config.prefix_fds.items()
        }
        self._replicas: list[list[int]] = [[] for _ in config.cards]  # engines, by model
        for engine in self._engines:
            self._replicas[engine[EngineField.MODEL]].append(engine.seat.index)
        self._turns = itertools.count()
        self._names = [card.name for card in config.cards]
        self._demand_fd = config.demand_fd
        self._waiting = LoadQueue(board, slot, len(config.cards), config.max_num_queued)

    @property
    def are_waiting(self) -> bool:
        """Whether requests wait for an engine."""
        return bool(self._waiting)

    def send(self, requests: list[RoutedRequest]) -> list[Refusal]:
        """Send the sequences of requests to an engine of each one's model, or have them wait.

        It waits while a link is full. Return those that can neither be sent nor wait.
        """
        parcels, refusals, before = Parcels(list), list[Refusal](), self._waiting.models
        for routed in requests:
            is_next = not self._waiting[routed.model] or routed.request.engine >= 0
            if not routed.prompts or (is_next and self._put(parcels, routed)):
                continue
            try:
                self._waiting.add(routed)
            except QueueFull as error:
                refusals.append(Refusal(routed, error))
        self._send(parcels)
        refusals += self.send_waiting()
        if self._waiting.models - before:
            wake(self._demand_fd)
        return refusals

    def send_waiting(self) -> list[Refusal]:
        """Send what has waited for an engine; return what waits for none any more."""
        if not self._waiting:
            return []
        parcels, refusals = Parcels(list), list[Refusal]()
        for model in range(len(self._replicas)):
            self._waiting.take(model, partial(self._put, parcels))
            if self._waiting[model]:
                refusals += self._refuse_failed(model)
        self._send(parcels)
        return refusals

    def _put(self, parcels: Parcels, routed: RoutedRequest) -> bool:
        """Add a request to what its engine will get; return whether there is one."""
        engine = self._reserve(*routed)
        if engine is None:
            return False
        parcels[engine].extend(routed.prompts)
        return True

    def _send(self, parcels: Parcels) -> None:
        for engine, prompts in parcels.items():
            link = self._remote.get(engine)
            if link is None or not link.send(prompts):
                self._links.send(engine, prompts)

    def follow(self) -> None:
        """Keep to the sessions of engines on other machines."""
        for link in self._remote.values():
            link.follow()

    def drop(self, is_aborted: Callable[[int], bool]) -> None:
        """Forget waiting requests whose clients have left."""
        self._waiting.drop(is_aborted)

    def _refuse_failed(self, model: int) -> list[Refusal]:
        """Refuse what waits for a model that could not be loaded lately."""
        engines = [self._engines[engine] for engine in self._replicas[model]]
        if any(slot[EngineField.SEATING] != Seating.VACANT for slot in engines):
            return []
        failed, retry_s = last_failure(engines)
        if failed is None:
            return []
        error = ModelNotLoaded(self._names[model], failed.last_death.how, retry_s)
        return self._waiting.fail(model, error)

    def _reserve(self, model: int, request: HttpRequest, prompts: Prompts) -> int | None:
        """Choose an engine that keeps its seat until it has taken the prompts, or none."""
        num_tokens = sum(len(ids) for _, ids in prompts)
        while True:
            self._slot.beat()
            engine = self._engine_of(self._replicas[model], request, prompts)
            if engine is None:
                return None
            self._slot.add(TokenizerField.SENT_TOKENS + engine, num_tokens)
            if self._engines[engine][EngineField.SEATING] != Seating.VACANT:
                return engine
            self._slot.add(TokenizerField.SENT_TOKENS + engine, -num_tokens)

    def _engine_of(self, replicas: list[int], request: HttpRequest, prompts: Prompts) -> int | None:
        """Choose an engine, and count why."""
        counts = self._slot.of_model(self._engines[replicas[0]][EngineField.MODEL])
        if request.engine in replicas and self._is_ready(request.engine):
            counts.add(TokenizerField.RESUME_ROUTED, len(replicas) > 1)
            return request.engine
        replicas = self._takers(replicas)
        if len(replicas) <= 1:
            return replicas[0] if replicas else None
        loads = self._loads(replicas, prompts)
        chosen = choose(loads, next(self._turns) % len(loads))
        num_cached = loads[chosen].num_cached
        is_best = 0 < num_cached == max(load.num_cached for load in loads)
        counts.add(TokenizerField.PREFIX_ROUTED if is_best else TokenizerField.LOAD_ROUTED)
        counts.add(TokenizerField.ROUTED_CACHED_TOKENS, num_cached)
        return replicas[chosen]

    def _takers(self, replicas: list[int]) -> list[int]:
        """Return the engines that take new requests: ready ones.

        One that leaves does if another is to follow. Where none follows, its model is unloaded.
        """
        there = [index for index in self._links.present if index in replicas]
        ready = [index for index in there if self._is_ready(index)]
        seated = [
            index for index in there if self._engines[index][EngineField.SEATING] == Seating.SEATED
        ]
        return ([index for index in seated if index in ready] or ready) if seated else []

    def _loads(self, replicas: list[int], prompts: Prompts) -> list[ReplicaLoad]:
        page_tokens = max(self._engines[index][EngineField.PAGE_TOKENS] for index in replicas)
        distinct = {id(ids): (request, ids) for request, ids in prompts}.values()
        num_tokens = sum(len(ids) for _, ids in distinct)
        chains = [digests_of(request, ids, page_tokens) for request, ids in distinct]
        return [
            ReplicaLoad(
                self._is_ready(index),
                self._num_pending(index) + num_tokens,
                sum(page_tokens * count_held(self._indexes[index], chain) for chain in chains),
                self._engines[index][EngineField.PREFILL_RATE],
            )
            for index in replicas
        ]

    def _num_pending(self, engine: int) -> int:
        """Return how many tokens an engine has to compute, those on their way included."""
        return max(self._backlogs[engine](), 0) + self._engines[engine][EngineField.PENDING_TOKENS]

    def _is_ready(self, engine: int) -> bool:
        """Whether an engine serves, even if it is leaving."""
        slot = self._engines[engine]
        is_there = slot[EngineField.SEATING] != Seating.VACANT
        return is_there and slot[CommonField.STATE] == State.READY

    def close(self) -> None:
        """Drop all links."""
        for link in self._remote.values():
            link.close()
        self._links.close()


def wake(fd: int) -> None:
    """Wake the supervisor by its pipe; one that is full wakes it as well."""
    if fd >= 0:
        with suppress(BlockingIOError):
            os.write(fd, b"\0")


def count_held(indexes: Sequence[PrefixIndex], digests: Sequence[bytes]) -> int:
    """Return how many pages at the beginning of a chain an engine or its store has."""
    count = 0
    while more := max(index.count_cached(islice(digests, count, None)) for index in indexes):
        count += more
    return count


def digests_of(request: GenerateRequest, ids: Ids, page_tokens: int) -> list[bytes]:
    """Return the digests of a prompt's full pages but for its last token, as engines reuse them."""
    digests: list[bytes] = []
    num_pages = (len(ids) - 1) // page_tokens if page_tokens else 0
    chain_digests(digests, array("i", ids), page_tokens, num_pages, request.salt)
    return digests
