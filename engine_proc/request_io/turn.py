"""What an engine takes from its inbox between two steps, whatever has arrived."""

from collections.abc import Iterator
from typing import Protocol

from headrace.ipc.messages import ToEngine
from headrace.ipc.sockets import Frame

MAX_TURN_BYTES = 1 << 20  # of messages: 260,000 tokens, hashed in 20 ms
MESSAGE_BYTES = 1 << 10  # that a message counts as beside its frame


class EngineInbox(Protocol):
    """Where messages to an engine come."""

    def receive(self, timeout_ms: int) -> tuple[ToEngine, Frame] | None:
        """Return the next message and its frame, or None after `timeout_ms`."""

    def close(self) -> None:
        """Take no more."""


def messages_of_turn(
    inbox: EngineInbox, first: tuple[ToEngine, Frame] | None
) -> Iterator[tuple[ToEngine, Frame]]:
    """Yield `first`, and what has arrived since, up to a limit; others wait for the next turn."""
    received, num_bytes = first, 0
    while received is not None:
        yield received
        num_bytes += len(received[1]) + MESSAGE_BYTES
        received = inbox.receive(0) if num_bytes < MAX_TURN_BYTES else None
