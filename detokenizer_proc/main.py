"""Detokenizer process: token ids in, ready-to-write HTTP bytes out.
In: ToDetokenizer (engine_proc).  Out: ToFrontend, ToEngine (stop strings)."""

import time
from collections.abc import Callable

from headrace.board.backlog import detokenizer_backlog
from headrace.board.board import Slot, State
from headrace.board.fields import CommonField, DetokenizerField, EngineField
from headrace.config.process_configs import DetokenizerConfig
from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.response_stats import ResponseStatsCollector
from headrace.detokenizer_proc.text import load_vocabulary
from headrace.ipc.frontend_links import FrontendLinks
from headrace.ipc.messages import ResponseFrames, ToDetokenizer
from headrace.ipc.sockets import STEP_HIGH_WATER, Inbox, Outbox, address
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
        engines = list(context.board.of("engine"))
        self._engines = [EngineLink(config.run_dir, slot, self._slot.beat) for slot in engines]
        self._responses = [self._no_responses(engine) for engine in self._engines]  # by engine
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
        self._is_holding = False
        mark_start(self._slot)

    def work(self) -> None:
        """Handle and render pending messages; block if there are none."""
        wait_ms = IDLE_MS if all([engine.is_ready for engine in self._engines]) else AWAY_MS
        if self._is_holding:
            wait_ms = POLL_INTERVAL_MS
        elif self._is_writing:
            wait_ms = 0
        received = self._inbox.receive(wait_ms)
        self._begin_anew(all_is_here=received is None)
        num_steps = 0
        while received is not None:
            self._responses[received[0].engine].feed(*received)
            if self._stats is not None:
                self._stats.feed(received[0], time.monotonic_ns())
            self._slot.add(DetokenizerField.TOKENS, len(received[1]) // 4)
            num_steps += 1
            received = self._inbox.receive(0) if num_steps < MAX_STEPS else None
        if len(self._engines) > 1:
            self._begin_anew(all_is_here=num_steps < MAX_STEPS)
        if num_steps or self._is_holding or self._is_writing:
            self._send_frames()
            self._slot.add(DetokenizerField.MESSAGES_TAKEN, num_steps)
        else:
            self._backlog.settle_idle()
        self._slot[DetokenizerField.OPEN_RESPONSES] = sum(map(len, self._responses))

    @property
    def _is_writing(self) -> bool:
        """Whether there are whole responses of which a part is still to be rendered."""
        return any([responses.is_writing for responses in self._responses])

    def _send_frames(self) -> None:
        """Send rendered output to all frontends without a backlog."""
        for engine, responses in zip(self._engines, self._responses, strict=True):
            for stop in responses.stops():
                engine.outbox.send(stop)
            for place, times in responses.readings().items():
                self._slot.add(DetokenizerField.TOOL_READINGS + place, times)
        self._is_holding = False
        for frontend in range(len(self._frontends)):
            if self._frontends.backlog(frontend) >= MAX_BEHIND:
                self._is_holding = True
                continue
            for index, responses in enumerate(self._responses):
                frames = responses.render(frontend)
                if frames is not None:
                    self._send(frontend, frames.message(index), frames.data())

    def _send(self, frontend: int, message: ResponseFrames, data: bytes) -> None:
        if self._stats is not None:
            message = self._stats.add_to(message, time.monotonic_ns())
        self._frontends.send(frontend, message, data)
        self._slot.add(DetokenizerField.FRAMES)

    def _begin_anew(self, all_is_here: bool) -> None:
        """Send the engines of a model the tokens that were generated under one that is replaced.

        The requests will be sent again, to any of these: what is here belongs to their old ids.

        Args:
            all_is_here: nothing waits in the inbox. What comes while a replacement is not ready was
                sent by its predecessor.
        """
        for index, engine in enumerate(self._engines):
            if not engine.is_another or not (all_is_here or engine.is_ready):
                continue
            engine.note()
            if len(self._responses[index]):
                generated = self._responses[index].generated()
                for each in self._engines:
                    if each is engine or (each.model == engine.model and each.is_ready):
                        each.outbox.send(*generated)
                self._responses[index] = self._no_responses(engine)
            if self._stats is not None:
                self._stats.clear()

    def _no_responses(self, engine: "EngineLink") -> InflightResponses:
        config = self._config
        return InflightResponses(
            self._vocabularies[engine.model],
            config.num_frontends,
            config.stream_interval,
            self._limit,
            in_progress=self._in_progress,
        )

    def _in_progress(self, request: int) -> None:
        """Publish the response to blame if this process dies; 0 is none."""
        self._slot[DetokenizerField.RESPONSE_AT_HAND] = request

    def close(self) -> None:
        """Drop all links."""
        self._inbox.close()
        for engine in self._engines:
            engine.outbox.close()
        self._frontends.close()


class EngineLink:
    """The link to an engine, and what the board tells of the process in its seat."""

    def __init__(self, run_dir: str, slot: Slot, on_wait: Callable[[], None]) -> None:
        self.outbox = Outbox(address(run_dir, "engine", slot.seat.index), on_wait=on_wait)
        self._slot = slot
        self.model = slot[EngineField.MODEL]
        self.note()

    @property
    def is_ready(self) -> bool:
        """Whether the engine serves."""
        return self._slot[CommonField.STATE] == State.READY

    @property
    def is_another(self) -> bool:
        """Whether a process has started in its seat since the last `note`."""
        return self._slot[CommonField.STARTS] != self._starts

    def note(self) -> None:
        """Take note of the process that is in its seat now."""
        self._starts = self._slot[CommonField.STARTS]


def mark_start(slot: Slot) -> None:
    """Publish the response that was in progress when the previous process in this seat died.

    Frontends read it once this process is ready; by then another response may be at hand.
    """
    slot[DetokenizerField.LAST_RESPONSE_AT_HAND] = slot[DetokenizerField.RESPONSE_AT_HAND]
    slot[DetokenizerField.RESPONSE_AT_HAND] = 0
