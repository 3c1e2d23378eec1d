"""What the exit status of a process says of its end: the server's, and any of the ring's."""

import enum
import signal


class ExitStatus(enum.IntEnum):
    """Why a process ended on its own. Who could not go on has said why, in one line."""

    TOLD = 0  # it was told to
    FAILED = 1  # an error that nobody has foreseen; its traceback is in the log
    BAD_FLAGS = 2  # flags ask for what cannot be, or the machine does not let it
    BAD_MODEL = 3  # the model cannot be used
    HOPELESS = 4  # a process of the ring could not start, or died again and again
    SHORT_OF = 5  # the system has not given what it takes to start
    PEER_LOST = 6  # a worker: another with which it runs the model has ended


# Told in one line, and why the server ends, if it does. After the first three nobody is replaced.
FINAL = (ExitStatus.BAD_FLAGS, ExitStatus.BAD_MODEL, ExitStatus.HOPELESS)
CAUSES = (*FINAL, ExitStatus.SHORT_OF)


def ending(code: int) -> str:
    """Return how a process ended, in words; less than 0 is minus the signal that ended it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
