"""Numbers go to the device in one copy, into memory that stays where it is.

They are written into pinned memory, of which there are two pieces: while one is on its way, the
other can be written to. What few steps have is copied to pinned memory of torch's, piece by piece.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.pinned_memory import MakeRoom, room_for
from headrace.engine_proc.worker.execution.executor import Int32s

NUM_PIECES = 2


class StreamEvent(Protocol):
    """A place in a stream, as torch.cuda.Event."""

    def record(self) -> None:
        """Record the current position of the current stream."""
        ...

    def synchronize(self) -> None:
        """Wait until all is done that comes before."""
        ...


class NoEvent:
    """Of a CPU, which copies at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class ArraySender:
    """Sends arrays of int32.

    Args:
        size: numbers of the longest.
        make_event: of the stream that they are sent on.
        make_room: on the host, that they are sent from.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        make_event: Callable[[], StreamEvent] | None = None,
        make_room: MakeRoom | None = None,
    ) -> None:
        if make_event is None:
            make_event = torch.cuda.Event if device.type == "cuda" else NoEvent
        self.received = torch.zeros(size, dtype=torch.int32, device=device)
        make_room = make_room or room_for(device)
        self._pieces = [(make_room(size), make_event()) for _ in range(NUM_PIECES)]
        self._turn = 0

    def begin(self) -> Int32s:
        """Return what the next array is to be written to."""
        piece, sent = self._pieces[self._turn]
        sent.synchronize()
        return piece.numpy()

    def send(self, num: int) -> None:
        """Send so many numbers of it, once all is done with those that were sent before."""
        piece, sent = self._pieces[self._turn]
        self._turn = (self._turn + 1) % NUM_PIECES
        self.received[:num].copy_(piece[:num], non_blocking=True)
        sent.record()


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a copy of the host's numbers on a device, which is there once it has come so far.

    The host does not wait, as it would for a copy from memory that is not pinned.
    """
    if device.type == "cpu":
        return numbers.clone()
    return numbers.pin_memory().to(device, non_blocking=True)
