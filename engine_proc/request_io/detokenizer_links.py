"""Links to the detokenizers. Steps that end while a detokenizer is behind are sent as one message.

Each message wakes two processes, so a detokenizer that is behind gets fewer and larger ones.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from headrace.board.backlog import detokenizer_backlog
from headrace.board.board import MESSAGES_SENT, Board, Slot, State
from headrace.board.fields import CommonField
from headrace.ipc.messages import StepOutput
from headrace.ipc.sockets import STEP_HIGH_WATER, Frame, Outbox, address

MAX_BEHIND = 2  # steps that a detokenizer has not handled; it gets no more until it has
MAX_HELD = STEP_HIGH_WATER  # steps; with more, the engine waits for it


class StepOutbox(Protocol):
    """The link to one detokenizer."""

    def send_all(self, messages: Sequence[tuple[StepOutput, Frame]]) -> None:
        """Send steps with their frames as one message, waiting while there is no room."""

    def close(self) -> None:
        """Drop the link."""


class DetokenizerLinks:
    """The links of an engine to all detokenizers."""

    def __init__(self, outboxes: Iterable[StepOutbox], board: Board, slot: Slot) -> None:
        self._outboxes = list(outboxes)
        self._held: list[list[tuple[StepOutput, bytes]]] = [[] for _ in self._outboxes]
        self._slots = list(board.of("detokenizer"))
        self._backlogs = [detokenizer_backlog(board, i) for i in range(len(self._outboxes))]
        self._slot = slot
        self._engine = slot.seat.index

    @classmethod
    def of_ring(
        cls, run_dir: str, num_detokenizers: int, board: Board, slot: Slot
    ) -> "DetokenizerLinks":
        """Return the links to the detokenizers of the engine's own ring."""
        wheres = [address(run_dir, "detokenizer", index) for index in range(num_detokenizers)]
        return cls([Outbox(where, STEP_HIGH_WATER, slot.beat) for where in wheres], board, slot)

    def __len__(self) -> int:
        return len(self._outboxes)

    @property
    def are_holding(self) -> bool:
        """Whether there are outputs that are not sent."""
        return any(self._held)

    @property
    def are_serving(self) -> bool:
        """Whether all detokenizers are there."""
        return all(slot[CommonField.STATE] == State.READY for slot in self._slots)

    def hold(self, detokenizer: int, output: StepOutput, tokens: bytes) -> None:
        """Keep what a step brought until it is sent."""
        if self._engine:
            output = msgspec.structs.replace(output, engine=self._engine)
        self._held[detokenizer].append((output, tokens))

    def send_ready(self) -> None:
        """Send held outputs to each detokenizer that is not behind, or that has `MAX_HELD`."""
        for index, held in enumerate(self._held):
            if held and (self._backlogs[index]() < MAX_BEHIND or len(held) >= MAX_HELD):
                self._send(index)

    def flush(self) -> None:
        """Send all there is, waiting while a link is full."""
        for index, held in enumerate(self._held):
            if held:
                self._send(index)

    def close(self) -> None:
        """Drop all links."""
        for outbox in self._outboxes:
            outbox.close()

    def _send(self, index: int) -> None:
        held = self._held[index]
        self._slot.add(MESSAGES_SENT + index, len(held))
        self._outboxes[index].send_all(held)
        held.clear()
