"""Detokenizer process: token ids in, ready-to-write HTTP bytes out.
In: ToDetokenizer (engine_proc).  Out: ToFrontend, ToEngine (stop strings)."""

import time

from headrace.board.backlog import detokenizer_backlog
from headrace.board.board import Slot, State
from headrace.board.fields import CommonField, DetokenizerField
from headrace.config.process_configs import DetokenizerConfig
from headrace.detokenizer_proc.inflight_responses import InflightResponses
from headrace.detokenizer_proc.response_stats import ResponseStatsCollector
from headrace.detokenizer_proc.text import load_vocabulary
from headrace.ipc.frontend_links import FrontendLinks
from headrace.ipc.messages import ToDetokenizer
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
        self._vocabulary = load_vocabulary(config.card.path)
        give_back()  # what the table was made of
        self._limit = CpuLimit(PARSER_CPU_S)
        self._responses = self._no_responses()
        self._stats = ResponseStatsCollector() if config.traces else None
        self._backlog = detokenizer_backlog(context.board, context.index)
        self._backlog.settle()
        self._inbox: Inbox[ToDetokenizer] = Inbox(
            address(config.run_dir, "detokenizer", context.index),
            ToDetokenizer,
            STEP_HIGH_WATER,
            context.tee,
        )
        self._engine = Outbox(address(config.run_dir, "engine"), on_wait=self._slot.beat)
        self._engine_slot = context.board.slot("engine")
        self._engine_starts = self._engine_slot[CommonField.STARTS]
        self._frontends = FrontendLinks(
            config.run_dir, config.num_frontends, context.board, self._slot
        )
        self._is_holding = False
        mark_start(self._slot)

    def work(self) -> None:
        """Handle and render pending messages; block if there are none."""
        is_away = self._engine_slot[CommonField.STATE] != State.READY
        wait_ms = AWAY_MS if is_away else IDLE_MS
        if self._is_holding:
            wait_ms = POLL_INTERVAL_MS
        elif self._responses.is_writing:
            wait_ms = 0
        received = self._inbox.receive(wait_ms)
        is_another = self._engine_slot[CommonField.STARTS] != self._engine_starts
        # What comes while that is not ready was sent by the one before it.
        if is_another and (received is None or self._engine_slot[CommonField.STATE] == State.READY):
            self._begin_anew()
        num_steps = 0
        while received is not None:
            self._responses.feed(*received)
            if self._stats is not None:
                self._stats.feed(received[0], time.monotonic_ns())
            self._slot.add(DetokenizerField.TOKENS, len(received[1]) // 4)
            num_steps += 1
            received = self._inbox.receive(0) if num_steps < MAX_STEPS else None
        if num_steps or self._is_holding or self._responses.is_writing:
            self._send_frames()
            self._slot.add(DetokenizerField.MESSAGES_TAKEN, num_steps)
        else:
            self._backlog.settle_idle()
        self._slot[DetokenizerField.OPEN_RESPONSES] = len(self._responses)

    def _send_frames(self) -> None:
        """Send rendered output to all frontends without a backlog."""
        for stop in self._responses.stops():
            self._engine.send(stop)
        for place, times in self._responses.readings().items():
            self._slot.add(DetokenizerField.TOOL_READINGS + place, times)
        self._is_holding = False
        for frontend in range(len(self._frontends)):
            if self._frontends.backlog(frontend) >= MAX_BEHIND:
                self._is_holding = True
                continue
            frames = self._responses.render(frontend)
            if frames is not None:
                message = frames.message()
                if self._stats is not None:
                    message = self._stats.add_to(message, time.monotonic_ns())
                self._frontends.send(frontend, message, frames.data())
                self._slot.add(DetokenizerField.FRAMES)

    def _begin_anew(self) -> None:
        """Send the engine the tokens that were generated under its predecessor.

        The requests will be sent again: all there is here belongs to their old ids.
        """
        self._engine_starts = self._engine_slot[CommonField.STARTS]
        if len(self._responses):
            self._engine.send(*self._responses.generated())
            self._responses = self._no_responses()
        if self._stats is not None:
            self._stats.clear()

    def _no_responses(self) -> InflightResponses:
        config = self._config
        return InflightResponses(
            self._vocabulary,
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
        self._engine.close()
        self._frontends.close()


def mark_start(slot: Slot) -> None:
    """Publish the response that was in progress when the previous process in this seat died.

    Frontends read it once this process is ready; by then another response may be at hand.
    """
    slot[DetokenizerField.LAST_RESPONSE_AT_HAND] = slot[DetokenizerField.RESPONSE_AT_HAND]
    slot[DetokenizerField.RESPONSE_AT_HAND] = 0
