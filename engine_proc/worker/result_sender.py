"""What a worker says of its steps, in their order, as soon as it can be said.

A device goes on while the host prepares the next step for it, so a result is sent when the next
step is on its way, or when it is there. Results that are there at once are sent at once.
"""

from collections.abc import Callable

from headrace.engine_proc.worker.execution.runner import PendingResult
from headrace.ipc.worker_messages import StepFailed, StepResult


class ResultSender:
    """Results that are sent, and one that is awaited.

    Args:
        send: hands a result to the engine.
    """

    def __init__(self, send: Callable[[StepResult | StepFailed], None]) -> None:
        self._send = send
        self._pending: PendingResult | None = None

    @property
    def is_open(self) -> bool:
        """Whether a result is awaited."""
        return self._pending is not None

    @property
    def is_due(self) -> bool:
        """Whether it is there."""
        return self._pending is not None and self._pending.is_there

    def add(self, result: StepResult | StepFailed | PendingResult) -> None:
        """Send what there was to be sent before, and take the next."""
        self.flush()
        if isinstance(result, StepResult | StepFailed):
            self._send(result)
        else:
            self._pending = result

    def flush(self) -> None:
        """Wait for the result that is awaited, if there is one, and send it.

        Raises:
            CollectiveFailed: another worker is gone.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._send(pending.wait())
