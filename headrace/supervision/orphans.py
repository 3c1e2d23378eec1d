"""Orphans: processes whose parents have ended, which the first of a container inherits."""

import contextlib
import os
from collections.abc import Container


def reap_orphans(own: Container[int]) -> None:
    """Reap processes whose parents have ended: PID 1 of a container inherits them.

    Args:
        own: children of this process, which are waited for elsewhere.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:  # it has ended since; it comes first until it is waited for
                return
            os.waitpid(ended.si_pid, 0)
