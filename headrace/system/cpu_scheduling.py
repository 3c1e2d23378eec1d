"""CPU scheduling of processes where cores are short.

At the end of a time slice, Linux gives the core to the thread with the earliest deadline. Since
6.12 a process sets the length of its own slices, and a shorter one preempts at once. Before 6.12,
and where it is not allowed, nothing changes.
"""

import ctypes
import os
import platform
import struct

# <linux/sched/types.h>: size, policy, flags, nice, priority, runtime, deadline, period.
ATTRIBUTES = struct.Struct("<IIQiIQQQ")
SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
LONGEST_NS = 100_000_000
PLAIN = (os.SCHED_OTHER, os.SCHED_BATCH)  # any other policy has been chosen on purpose


def take_turns(is_urgent: bool) -> None:
    """Have this process, when it is woken, wait for a free core or the end of another's slice.

    Where cores are short, the running process finishes its work, and the next one finds more input
    at once. In a ring of five processes on two cores that raises throughput by a quarter. Where a
    core is free it changes nothing. An urgent process does not wait.
    """
    if os.sched_getscheduler(0) in PLAIN:
        policy = os.SCHED_OTHER if is_urgent else os.SCHED_BATCH
        os.sched_setscheduler(0, policy, os.sched_param(0))


def take_long_turns() -> None:
    """Request the longest time slices; a woken process may preempt them.

    For processes that work for long at a time: the same share of a core, in longer pieces.
    """
    number, policy = SYS_SCHED_SETATTR.get(platform.machine()), os.sched_getscheduler(0)
    if policy in PLAIN and number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        wanted = ATTRIBUTES.pack(ATTRIBUTES.size, policy, 0, nice, 0, LONGEST_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, wanted, 0)
