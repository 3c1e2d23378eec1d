"""What the engine sends a worker: steps, and loads of adapters, which go on beside them."""

from collections.abc import Callable

from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.engine_proc.worker.execution.adapter_loader import AdapterLoader
from headrace.ipc.worker_messages import (
    AdapterLoaded,
    LoadAdapter,
    Masks,
    Resume,
    Step,
    ToWorker,
)

POLL_INTERVAL_S = 1e-4  # while an adapter is loaded, and no step has come


class StepInbox:
    """A worker's messages but for loads: these begin, and are answered, while it receives.

    Args:
        adapters: None where the engine has none.
        send: answers the engine.
    """

    def __init__(
        self,
        steps: StepChannel[ToWorker],
        adapters: AdapterLoader | None,
        send: Callable[[AdapterLoaded], None],
    ) -> None:
        self._steps = steps
        self._adapters = adapters
        self._send = send

    def receive(self, timeout_s: float, look_us: int | None = None) -> Step | Masks | Resume | None:
        """Return the next message, or None after `timeout_s` at most.

        Args:
            look_us: as in `StepChannel.receive`.
        """
        is_loading = self._adapters is not None and self._adapters.settle(self._send)
        wait_s = min(POLL_INTERVAL_S, timeout_s) if is_loading else timeout_s
        message = self._steps.receive(wait_s, look_us)
        if not isinstance(message, LoadAdapter):
            return message
        assert self._adapters is not None
        self._adapters.begin(message)
        return None
