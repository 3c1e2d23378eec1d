"""`with_parent PID MODULE args`: `python -m MODULE`, which ends when its parent PID does.

The kernel sends the signal, when the thread that has started this process ends.
"""

import os
import signal
import sys

from headrace.runtime.process import die_with_parent


def main(parent: int, *command: str) -> None:
    """Become the module, at the priority of any other where this user may: Ray's is low."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        text = f"{command[0]} runs at niceness {niceness}; RAY_worker_niceness=0 ray start has 0"
        print(text, file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what is ignored or blocked stays so else
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    die_with_parent(parent, signal.SIGTERM)
    os.execv(sys.executable, (sys.executable, "-m", *command))  # which keeps that signal


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
