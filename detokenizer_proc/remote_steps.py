"""Steps of engines on other machines, by a link to each, beside those that come by its seat."""

import logging
from collections import deque
from typing import Any

import msgspec

from headrace.board.board import Board
from headrace.config.process_configs import DetokenizerConfig
from headrace.ipc.messages import StepOutput
from headrace.ipc.recorder import Tee
from headrace.ipc.remote_messages import Outputs
from headrace.ipc.sockets import Frame
from headrace.runtime.message_checks import OutputLimits, WrongMessage, check_outputs
from headrace.runtime.session_link import SessionLink

log = logging.getLogger(__name__)


class RemoteSteps:
    """The links of a detokenizer to engines on other machines."""

    def __init__(
        self, config: DetokenizerConfig, board: Board, index: int, tee: Tee | None = None
    ) -> None:
        self._index = index
        self._tee = tee
        self._num_detokenizers = len(list(board.of("detokenizer")))
        self._vocab_size = config.vocab_size
        self._links = {
            engine: SessionLink(config.run_dir, remote, board.slot("engine", engine), index)
            for engine, remote in config.remote_engines.items()
        }
        self._outputs = msgspec.msgpack.Decoder(Outputs)
        self._unread: deque[tuple[StepOutput, Frame]] = deque()

    @property
    def polled(self) -> list[tuple[Any, int]]:
        """What tells that there is something to do here."""
        return [polled for link in self._links.values() for polled in link.polled]

    def follow(self) -> None:
        """Keep to the sessions of all engines. What is unread of one that has ended is dropped."""
        for engine, link in self._links.items():
            session = link.session
            link.follow()
            if link.session != session:
                kept = [each for each in self._unread if each[0].engine != engine]
                self._unread = deque(kept)

    def receive(self) -> tuple[StepOutput, Frame] | None:
        """Return the next step with its frame, or None."""
        if not self._unread:
            for engine, link in self._links.items():
                frames = link.receive()
                if frames is not None:
                    self._take(engine, link, frames)
        return self._unread.popleft() if self._unread else None

    def _take(self, engine: int, link: SessionLink, frames: list[Frame]) -> None:
        """Take the steps of a message. What is wrong ends the session."""
        steps = frames[1:]
        limits = OutputLimits(engine, self._num_detokenizers, self._vocab_size)
        try:
            outputs = self._outputs.decode(frames[0])
            if outputs.session != link.session or outputs.detokenizer != self._index:
                return
            self._unread.extend(check_outputs(outputs, steps, limits))
        except (msgspec.MsgspecError, WrongMessage) as error:
            log.error("engine %d, on another machine, sends what is wrong: %s", engine, error)
            link.give_up()
            return
        if self._tee is not None:
            self._tee.take(steps)

    def close(self) -> None:
        """Drop all links."""
        for link in self._links.values():
            link.close()
