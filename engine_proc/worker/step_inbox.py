"""What the engine sends a worker: steps, and what goes on beside them.

These are loads of adapters, and copies of pages between a GPU and its host tier.
"""

from collections import deque
from collections.abc import Callable

from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.engine_proc.worker.execution.adapter_loader import AdapterLoader
from headrace.engine_proc.worker.execution.loaded_model import PageCopier
from headrace.ipc.worker_messages import (
    CopyPages,
    FromWorker,
    LoadAdapter,
    Masks,
    Rest,
    Resume,
    Step,
    ToWorker,
)

POLL_INTERVAL_S = 1e-4  # while something goes on beside steps, and no step has come


class StepInbox:
    """What a worker does in turn. All else begins, and is answered, while it receives.

    Args:
        adapters: None where the engine has none.
        copier: None without a host tier.
        send: answers the engine.
    """

    def __init__(
        self,
        steps: StepChannel[ToWorker],
        adapters: AdapterLoader | None,
        copier: PageCopier | None,
        send: Callable[[FromWorker], None],
    ) -> None:
        self._steps = steps
        self._adapters = adapters
        self._copier = copier
        self._send = send
        self._kept: deque[Step | Resume | Rest] = deque()  # that came before masks

    def receive(
        self, timeout_s: float, look_us: int | None = None
    ) -> Step | Masks | Resume | Rest | None:
        """Return the next message, or None after `timeout_s` at most.

        Args:
            look_us: as in `StepChannel.receive`.
        """
        return self._kept.popleft() if self._kept else self._receive(timeout_s, look_us)

    def wait_for_masks(self, timeout_s: float) -> None:
        """Wait for the masks of a step; steps that were sent before them come later.

        Args:
            timeout_s: between looks, in which signals are handled.
        """
        while not isinstance(message := self._receive(timeout_s), Masks):
            if message is not None:
                self._kept.append(message)

    def _receive(
        self, timeout_s: float, look_us: int | None = None
    ) -> Step | Masks | Resume | Rest | None:
        is_loading = self._adapters is not None and self._adapters.settle(self._send)
        is_copying = self._copier is not None and self._copier.settle(self._send)
        wait_s = min(POLL_INTERVAL_S, timeout_s) if is_loading or is_copying else timeout_s
        message = self._steps.receive(wait_s, look_us)
        if isinstance(message, LoadAdapter):
            assert self._adapters is not None
            self._adapters.begin(message)
        elif isinstance(message, CopyPages):
            assert self._copier is not None
            self._copier.begin(message)
        else:
            return message
        return None
