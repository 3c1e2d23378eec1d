"""Exit statuses of the server and of the processes of the ring."""

import enum
import signal


class ExitStatus(enum.IntEnum):
    """Exit status of a process. Errors 2 to 6 are logged in one line before the exit."""

    TOLD = 0  # asked to stop
    FAILED = 1  # an unexpected error; its traceback is in the log
    BAD_FLAGS = 2  # flags ask for what cannot be, or the machine does not let it
    BAD_MODEL = 3  # the model cannot be used
    HOPELESS = 4  # a process of the ring did not start, or died repeatedly
    SHORT_OF = 5  # the system lacks a resource that the start needs
    PEER_LOST = 6  # a worker: another with which it runs the model has ended
    NODE_LOST = 7  # a worker: the machine that has it is out of reach


# Causes of the server's end, logged in one line. After a final one no process is replaced.
FINAL = (ExitStatus.BAD_FLAGS, ExitStatus.BAD_MODEL, ExitStatus.HOPELESS)
CAUSES = (*FINAL, ExitStatus.SHORT_OF)


def ending(code: int) -> str:
    """Return how a process ended, in words; less than 0 is minus the signal that ended it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
