"""Detokenizer process: token ids in, ready-to-write HTTP bytes out.
In: ToDetokenizer (engine_proc).  Out: ToFrontend, ToEngine (stop strings)."""

import time

from headrace.board.backlog import detokenizer_backlog
from headrace.board.board import Counts, Slot, State
from headrace.board.fields import CommonField, DetokenizerField, EngineField, Seating
from headrace.config.process_configs import DetokenizerConfig
from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.remote_steps import RemoteSteps
from headrace.detokenizer_proc.response_stats import ResponseStatsCollector
from headrace.detokenizer_proc.text import load_vocabulary
from headrace.ipc.engine_links import EngineLinks
from headrace.ipc.frontend_links import FrontendLinks
from headrace.ipc.messages import ResponseFrames, StepOutput, ToDetokenizer
from headrace.ipc.sockets import STEP_HIGH_WATER, Frame, Inbox, address, wait_for_any
from headrace.runtime.process import Context
from headrace.system.cpu_limit import CpuLimit
from headrace.system.malloc import give_back

IDLE_MS = 500
AWAY_MS = 20  # between looks at whether there is another engine
MAX_STEPS = 64  # taken together
MAX_BEHIND = 2  # messages that a frontend has not handled; it gets no more until it has
PARSER_CPU_S = 0.5  # for what one step brings of a sequence; that is 10 us for most
POLL_INTERVAL_MS = 1  # between looks at a frontend that is behind


def main(config: DetokenizerConfig, context: Context) -> None:
    """Render what the engine generates until SIGTERM."""
    detokenizer = Detokenizer(config, context)
    context.ready()
    while True:
        context.slot.beat()
        detokenizer.work()


class Detokenizer:
    """A detokenizer at work: one message per step and frontend.

    Messages that arrive while this process or a frontend is behind are rendered together: more text
    goes into fewer pieces then, so the delay shrinks.
    """

    def __init__(self, config: DetokenizerConfig, context: Context) -> None:
        self._slot = context.slot
        self._config = config
        self._vocabularies = [load_vocabulary(path) for path in config.tokenizer_paths]
        give_back()  # what the tables were made of
        self._limit = CpuLimit(PARSER_CPU_S)
        self._engines = [EngineWatch(slot) for slot in context.board.of("engine")]
        self._links = EngineLinks(config.run_dir, context.board, self._slot.beat)
        self._responses: dict[int, InflightResponses] = {}  # by engine
        self._stats = ResponseStatsCollector() if config.traces else None
        self._backlog = detokenizer_backlog(context.board, context.index)
        self._backlog.settle()
        self._inbox: Inbox[ToDetokenizer] = Inbox(
            address(config.run_dir, "detokenizer", context.index),
            ToDetokenizer,
            STEP_HIGH_WATER,
            context.tee,
        )
        self._frontends = FrontendLinks(
            config.run_dir, config.num_frontends, context.board, self._slot
        )
        self._remote = RemoteSteps(config, context.board, context.index, context.tee)
        self._num_counted = 0  # of the steps in progress, those that the backlog has
        self._is_quiet = False  # nothing has come in the last wait
        self._is_holding = False
        mark_start(self._slot)

    def work(self) -> None:
        """Handle and render pending messages; block if there are none."""
        is_away = any([self._engines[engine].is_away for engine in self._links.present])
        wait_ms = AWAY_MS if is_away else IDLE_MS
        if self._is_holding:
            wait_ms = POLL_INTERVAL_MS
        elif self._is_writing:
            wait_ms = 0
        self._remote.follow()
        received = self._receive(wait_ms)
        self._begin_anew(all_is_here=received is None)
        num_steps = 0
        while received is not None:
            engine = received[0].engine
            self._responses_of(engine).feed(*received)
            if self._stats is not None:
                self._stats.feed(received[0], time.monotonic_ns())
            self._counts_of(engine).add(DetokenizerField.TOKENS, len(received[1]) // 4)
            num_steps += 1
            received = self._receive(0) if num_steps < MAX_STEPS else None
        if len(self._engines) > 1:
            self._begin_anew(all_is_here=num_steps < MAX_STEPS)
        if num_steps or self._is_holding or self._is_writing:
            self._send_frames()
            self._slot.add(DetokenizerField.MESSAGES_TAKEN, self._num_counted)
            self._num_counted = 0
        elif self._is_quiet:
            self._backlog.settle_idle()
        self._slot[DetokenizerField.OPEN_RESPONSES] = sum(map(len, self._responses.values()))

    def _receive(self, timeout_ms: int) -> tuple[StepOutput, Frame] | None:
        """Return the next step with its frame, or None after `timeout_ms` or a link's change."""
        received = self._take_next()
        if received is None and timeout_ms:
            polled = [*self._inbox.polled, *self._remote.polled]
            self._is_quiet = not wait_for_any(polled, timeout_ms)
            received = self._take_next()
        return received

    def _take_next(self) -> tuple[StepOutput, Frame] | None:
        received = self._inbox.receive(0)
        if received is None:
            return self._remote.receive()
        self._num_counted += 1
        return received

    @property
    def _is_writing(self) -> bool:
        """Whether there are whole responses of which a part is still to be rendered."""
        return any([responses.is_writing for responses in self._responses.values()])

    def _send_frames(self) -> None:
        """Send rendered output to all frontends without a backlog."""
        for engine, responses in self._responses.items():
            for stop in responses.stops():
                self._links.send(engine, [(stop, b"")])
            for place, times in responses.readings().items():
                self._counts_of(engine).add(DetokenizerField.TOOL_READINGS + place, times)
        self._is_holding = False
        for frontend in range(len(self._frontends)):
            if self._frontends.backlog(frontend) >= MAX_BEHIND:
                self._is_holding = True
                continue
            for index, responses in self._responses.items():
                frames = responses.render(frontend)
                if frames is not None:
                    self._send(frontend, frames.message(index), frames.data())

    def _send(self, frontend: int, message: ResponseFrames, data: bytes) -> None:
        if self._stats is not None:
            message = self._stats.add_to(message, time.monotonic_ns())
        self._frontends.send(frontend, message, data)
        self._slot.add(DetokenizerField.FRAMES)

    def _begin_anew(self, all_is_here: bool) -> None:
        """Send the engines of a model the tokens that were generated under one that has died.

        The requests will be sent again, to any of these: what is here belongs to their old ids. It
        is kept while there are none, because their model is unloaded.

        Args:
            all_is_here: nothing waits in the inbox. What comes while a replacement is not ready was
                sent by its predecessor.
        """
        for index in {*self._links.present, *self._responses}:
            engine = self._engines[index]
            if not engine.has_died or not (all_is_here or engine.is_ready):
                continue
            heirs = [
                other
                for other, each in enumerate(self._engines)
                if each.model == engine.model and (each.is_ready or each.is_starting)
            ]
            responses = self._responses.get(index)
            if responses and not heirs:
                continue
            engine.note()
            self._responses.pop(index, None)
            if responses:
                generated = responses.generated()
                for other in heirs:
                    self._links.send(other, [generated])
            if self._stats is not None:
                self._stats.clear()

    def _counts_of(self, engine: int) -> Counts:
        """Return the counts of an engine's model."""
        return self._slot.of_model(self._engines[engine].model)

    def _responses_of(self, engine: int) -> InflightResponses:
        """Return the responses of an engine."""
        found = self._responses.get(engine)
        if found is None:
            config = self._config
            found = self._responses[engine] = InflightResponses(
                self._vocabularies[self._engines[engine].model],
                config.num_frontends,
                config.stream_interval,
                self._limit,
                in_progress=self._in_progress,
            )
        return found

    def _in_progress(self, request: int) -> None:
        """Publish the response to blame if this process dies; 0 is none."""
        self._slot[DetokenizerField.RESPONSE_AT_HAND] = request

    def close(self) -> None:
        """Drop all links."""
        self._inbox.close()
        self._links.close()
        self._frontends.close()
        self._remote.close()


class EngineWatch:
    """What the board tells of the process in an engine's seat."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.model = slot[EngineField.MODEL]
        self.note()

    @property
    def is_ready(self) -> bool:
        """Whether the engine serves."""
        return self._slot[CommonField.STATE] == State.READY

    @property
    def is_starting(self) -> bool:
        """Whether it will."""
        return self._slot[CommonField.STATE] == State.STARTING

    @property
    def is_vacant(self) -> bool:
        """Whether the seat is to be had."""
        return self._slot[EngineField.SEATING] == Seating.VACANT

    @property
    def is_away(self) -> bool:
        """Whether there will be another engine soon."""
        return not (self.is_ready or self.is_vacant)

    @property
    def has_died(self) -> bool:
        """Whether an engine has died since the last `note`, and another starts or none will."""
        if self._slot[CommonField.DEATHS] == self._num_deaths:
            return False
        return self._slot[CommonField.STATE] != State.DEAD or self.is_vacant

    def note(self) -> None:
        """Take note of the deaths up to now."""
        self._num_deaths = self._slot[CommonField.DEATHS]


def mark_start(slot: Slot) -> None:
    """Publish the response that was in progress when the previous process in this seat died.

    Frontends read it once this process is ready; by then another response may be at hand.
    """
    slot[DetokenizerField.LAST_RESPONSE_AT_HAND] = slot[DetokenizerField.RESPONSE_AT_HAND]
    slot[DetokenizerField.RESPONSE_AT_HAND] = 0
