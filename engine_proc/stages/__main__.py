"""`python -m headrace.engine_proc.stages ADDRESS KEY_FILE LOG_LEVEL`: a stage of another machine.

It starts the process of the stage and ends with it. A server is the same to its processes.
"""

import subprocess
import sys
import time

from headrace.board.board import Board, Seat
from headrace.config.config import MAX_PP
from headrace.config.process_configs import StageConfig
from headrace.exit_status import ExitStatus
from headrace.runtime.process import spawn
from headrace.supervision.watchdog import HangWatchdog

LOOK_S = 0.5
STUCK_S = 60.0  # a worker's end may take some seconds, and so does a look at slow disks


def main(listen: str, key_file: str, log_level: str) -> int:
    """Return the exit status of the process."""
    seat = Seat("stage", 0)
    workers = (Seat("worker", stage) for stage in range(MAX_PP))
    board = Board.create([seat, *workers, Seat("frontend", 0)])  # that is the server's
    slot, watchdog = board.slot("stage"), HangWatchdog(STUCK_S)
    process = spawn(seat, StageConfig(listen=listen, key_file=key_file), board, log_level)
    while True:
        try:
            code = process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            if watchdog.check([slot], time.monotonic_ns()):
                process.kill()
        else:
            if slot.exit_reason:
                print(f"headrace: stage: {slot.exit_reason}", file=sys.stderr)
            return code if code >= 0 else ExitStatus.FAILED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
