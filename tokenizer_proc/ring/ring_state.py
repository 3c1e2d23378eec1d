"""The response of `/ring`, and what it is read from. Names end in their units.

Times (`_at`) are seconds since the epoch. Counters only grow, and survive a restart of their
process: a rate is the difference of two states by that of their `at`.
"""

import time
from typing import Any, Literal, TypeVar

import msgspec

from headrace.board.backlog import detokenizer_backlog, frontend_backlog, tokenizer_backlog
from headrace.board.board import Board, Slot, State
from headrace.board.fields import (
    BoardField,
    CommonField,
    DetokenizerField,
    EngineField,
    FetcherField,
    FrontendField,
    TokenizerField,
    VisionField,
    WorkerField,
)
from headrace.config.process_configs import TokenizerConfig
from headrace.system.procfs import vitals_of
from headrace.tokenizer_proc.ring.death_watch import Death, DeathWatch

Duty = Literal["text", "long text", "images", "GET"]


class RingProcess(msgspec.Struct, kw_only=True):
    """Fields of every process."""

    index: int  # among those of its role
    pid: int
    state: str  # "absent", "starting", "ready" or "dead"
    fault: str | None  # why it does not serve, though it may be ready
    served_at: float | None  # since when it serves, or its predecessor did
    restarts: int
    busy_s: float  # counter: processor time of the thread that does the work, in this process
    resident_bytes: int


class FrontendState(RingProcess, kw_only=True):
    """A frontend."""

    connections: int
    open_requests: int  # event streams and other GETs, too
    admitted: int  # requests whose body has come and whose response is incomplete
    requests: int  # counter
    queued_messages: int  # of tokenizers and detokenizers, not handled
    unsent_bytes: int  # of responses, for clients to read
    loop_lag_s: float  # by how much the last timer was late


class TokenizerState(RingProcess, kw_only=True):
    """A tokenizer."""

    duty: Duty
    queued_bytes: int  # of bodies, not handled
    requests: int  # counter
    prompt_tokens: int  # counter


class EngineState(RingProcess, kw_only=True):
    """An engine."""

    model: str
    waiting: int  # sequences
    waiting_tokens: int  # to compute for those
    running: int  # sequences
    steps: int  # counter
    step_age_s: float | None  # since the last one ended
    tokens_per_s: float  # generated lately
    generated_tokens: int  # counter
    computed_tokens: int  # counter: of prompts, too
    kv_pages: int
    kv_pages_free: int
    page_tokens: int
    prefix_queries: int  # counter: tokens of prompts looked up in the prefix cache,
    prefix_hits: int  # and those found
    preemptions: int  # counter
    drafts: int  # counter: tokens drafted,
    right_drafts: int  # and those accepted
    state_slots: int  # 0 of a model that has no states
    state_slots_free: int


class WorkerState(RingProcess, kw_only=True):
    """A worker, a child of an engine."""

    engine: int  # its index
    steps: int  # counter


class VisionState(RingProcess, kw_only=True):
    """A vision worker, a child of the engine."""

    images: int  # counter


class DetokenizerState(RingProcess, kw_only=True):
    """A detokenizer."""

    queued_steps: int  # not handled
    open_replies: int
    tokens: int  # counter


class FetcherState(RingProcess, kw_only=True):
    """The fetcher of images."""

    images: int  # counter


class InFlight(msgspec.Struct):
    """What is on its way, by the hop it is at. A request has a sequence for each of its texts."""

    admitted: int  # requests, at all hops together
    tokenizing: int  # requests sent to tokenizers and not handled
    waiting: int  # sequences that the engine has not begun
    running: int  # sequences in the engine's batch
    rendering: int  # responses that detokenizers have begun
    unsent_bytes: int  # of responses, for clients to read


class RingState(msgspec.Struct, kw_only=True, tag_field="type", tag="ring"):
    """All processes of the server, by role, at one moment."""

    at: float
    model: str  # or several, with commas between them
    frontends: list[FrontendState]
    tokenizers: list[TokenizerState]
    engines: list[EngineState]
    workers: list[WorkerState]
    visions: list[VisionState]
    detokenizers: list[DetokenizerState]
    fetchers: list[FetcherState]
    in_flight: InFlight
    deaths: list[Death]  # the latest ones, oldest first


P = TypeVar("P", bound=RingProcess)


class RingReader:
    """Reads states from the board."""

    def __init__(self, board: Board, config: TokenizerConfig, deaths: DeathWatch) -> None:
        self._board = board
        self._models = [card.name for card in config.cards]
        self._num_text_tokenizers = config.num_tokenizers
        self._handles_gets = config.handles_gets
        self._deaths = deaths
        self._num_lost = 0  # requests that died with their tokenizers, see `_tokenizing`

    def read(self) -> RingState:
        """Return the state now."""
        board = self._board
        now_ns = time.monotonic_ns()
        frontends = [self._frontend(slot, now_ns) for slot in board.of("frontend")]
        tokenizers = [self._tokenizer(slot, now_ns) for slot in board.of("tokenizer")]
        engines = [self._engine(slot, now_ns) for slot in board.occupied("engine")]
        detokenizers = [self._detokenizer(slot, now_ns) for slot in board.of("detokenizer")]
        return RingState(
            at=round(time.time(), 3),
            model=", ".join(self._models),
            frontends=frontends,
            tokenizers=tokenizers,
            engines=engines,
            workers=[
                process_state(
                    WorkerState,
                    slot,
                    now_ns,
                    engine=slot[WorkerField.ENGINE],
                    steps=slot[WorkerField.COMPUTED_STEPS],
                )
                for slot in board.occupied("worker")
            ],
            visions=[
                process_state(VisionState, slot, now_ns, images=slot[VisionField.ENCODED_IMAGES])
                for slot in board.of("vision")
            ],
            detokenizers=detokenizers,
            fetchers=[
                process_state(FetcherState, slot, now_ns, images=slot[FetcherField.FETCHED_IMAGES])
                for slot in board.of("fetcher")
            ],
            in_flight=InFlight(
                admitted=sum(one.admitted for one in frontends),
                tokenizing=self._tokenizing(tokenizers),
                waiting=sum(one.waiting for one in engines),
                running=sum(one.running for one in engines),
                rendering=sum(one.open_replies for one in detokenizers),
                unsent_bytes=sum(one.unsent_bytes for one in frontends),
            ),
            deaths=self._deaths.list(),
        )

    def _tokenizing(self, tokenizers: list[TokenizerState]) -> int:
        """Return how many requests tokenizers have been sent and not handled.

        A death loses some for good. They are known once no body waits.
        """
        num_sent = sum(slot[FrontendField.FORWARDED] for slot in self._board.of("frontend"))
        busy = [one for one in tokenizers if one.duty != "GET"]
        num_open = num_sent - sum(one.requests for one in busy)
        if not any(one.queued_bytes for one in busy):
            self._num_lost = num_open
        return max(num_open - self._num_lost, 0)

    def _frontend(self, slot: Slot, now_ns: int) -> FrontendState:
        return process_state(
            FrontendState,
            slot,
            now_ns,
            connections=slot[FrontendField.CONNECTIONS],
            open_requests=slot[FrontendField.OPEN_REQUESTS],
            admitted=slot[FrontendField.ADMITTED],
            requests=slot[FrontendField.REQUESTS],
            queued_messages=max(frontend_backlog(self._board, slot.seat.index)(), 0),
            unsent_bytes=slot[FrontendField.UNSENT_BYTES],
            loop_lag_s=round(slot[FrontendField.LAG_NS] / 1e9, 6),
        )

    def _tokenizer(self, slot: Slot, now_ns: int) -> TokenizerState:
        return process_state(
            TokenizerState,
            slot,
            now_ns,
            duty=self._duty(slot.seat.index),
            queued_bytes=max(tokenizer_backlog(self._board, slot.seat.index)(), 0),
            requests=slot[TokenizerField.HANDLED],
            prompt_tokens=self._total(slot, TokenizerField.PROMPT_TOKENS),
        )

    def _duty(self, index: int) -> Duty:
        last = sum(1 for _ in self._board.of("tokenizer")) - 1
        if index < self._num_text_tokenizers:
            return "text"
        if index == last and self._handles_gets:
            return "GET"
        return "long text" if index == self._num_text_tokenizers else "images"

    def _engine(self, slot: Slot, now_ns: int) -> EngineState:
        stepped_ns, running = slot[EngineField.STEPPED_NS], slot[EngineField.RUNNING]
        return process_state(
            EngineState,
            slot,
            now_ns,
            model=self._models[slot[EngineField.MODEL]],
            waiting=slot[EngineField.WAITING],
            waiting_tokens=slot[EngineField.WAITING_TOKENS],
            running=running,
            steps=slot[EngineField.STEPS],
            step_age_s=round(max(now_ns - stepped_ns, 0) / 1e9, 2) if stepped_ns else None,
            tokens_per_s=slot[EngineField.TOKENS_PER_SECOND] if running else 0,
            generated_tokens=slot[EngineField.GENERATED_TOKENS],
            computed_tokens=slot[EngineField.COMPUTED_TOKENS],
            kv_pages=slot[EngineField.PAGES_TOTAL],
            kv_pages_free=slot[EngineField.PAGES_FREE],
            page_tokens=slot[EngineField.PAGE_TOKENS],
            prefix_queries=slot[EngineField.PREFIX_QUERIES],
            prefix_hits=slot[EngineField.PREFIX_HITS],
            preemptions=slot[EngineField.PREEMPTIONS],
            drafts=slot[EngineField.DRAFTS],
            right_drafts=slot[EngineField.RIGHT_DRAFTS],
            state_slots=slot[EngineField.STATES_TOTAL],
            state_slots_free=slot[EngineField.STATES_FREE],
        )

    def _total(self, slot: Slot, field: BoardField) -> int:
        """Return what a process has counted for all models."""
        return sum([part[field] for part in self._board.parts_of(slot)])

    def _detokenizer(self, slot: Slot, now_ns: int) -> DetokenizerState:
        return process_state(
            DetokenizerState,
            slot,
            now_ns,
            queued_steps=max(detokenizer_backlog(self._board, slot.seat.index)(), 0),
            open_replies=slot[DetokenizerField.OPEN_RESPONSES],
            tokens=self._total(slot, DetokenizerField.TOKENS),
        )


def process_state(kind: type[P], slot: Slot, now_ns: int, **own: Any) -> P:
    """Return the state of a process: the fields of all roles, and its role's `own`."""
    pid, state = slot[CommonField.PID], State(slot[CommonField.STATE])
    is_alive = state in (State.STARTING, State.READY)
    vitals = vitals_of(pid) if is_alive else None
    return kind(
        index=slot.seat.index,
        pid=pid,
        state=state.name.lower(),
        fault=slot.unhealthy_reason(now_ns),
        served_at=round(slot.last_death.served_at, 3) or None,
        restarts=max(slot[CommonField.STARTS], 1) - 1,
        busy_s=0.0 if vitals is None else round(vitals.busy_s, 2),
        resident_bytes=0 if vitals is None else vitals.resident_bytes,
        **own,
    )
