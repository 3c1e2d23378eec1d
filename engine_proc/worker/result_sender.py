"""Sends a worker's step results to the engine, in order.

A device computes while the host prepares its next step. So a pending result is sent once the next
step is launched, or earlier if it is complete. A result that is complete at once is sent at once.
"""

from collections.abc import Callable

from headrace.engine_proc.worker.execution.runner import PendingResult
from headrace.ipc.worker_messages import StepFailed, StepResult


class ResultSender:
    """Sends results; at most one is pending.

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
        """Send the previous result, then this one; a pending one is kept until it is there."""
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
