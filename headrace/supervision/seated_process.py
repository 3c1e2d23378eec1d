"""A child of the supervisor, in its seat on the board."""

from dataclasses import dataclass, field

from headrace.board.board import Seat
from headrace.runtime.process import Process
from headrace.supervision.restart_backoff import RestartBackoff


@dataclass(eq=False)  # a signal's handler may change a queue that is being compared with
class SeatedProcess:
    """The process in a seat, with the descriptor that reports its end."""

    seat: Seat
    process: Process
    pidfd: int
    restarts: RestartBackoff = field(default_factory=RestartBackoff)
    start_at: float | None = None  # when another is to start, where this one has died
    is_new: bool = False  # an engine that has not served yet, in a server that does

    @property
    def is_engine(self) -> bool:
        """Whether it has the seat of an engine."""
        return self.seat.role == "engine"
