"""Who has a core when, where cores are short.

Linux gives a core to who has the earliest deadline, at the end of somebody's turn. Since 6.12 a
process says how long its own turns are, and one with shorter turns has the core at once. Before
that, and wherever it is not allowed, nothing changes.
"""

import ctypes
import os
import platform
import struct

# <linux/sched/types.h>: size, policy, flags, nice, priority, runtime, deadline, period.
ATTRIBUTES = struct.Struct("<IIQiIQQQ")
SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
LONGEST_NS = 100_000_000
PLAIN = (os.SCHED_OTHER, os.SCHED_BATCH)  # else somebody has chosen another policy


def take_turns(is_urgent: bool) -> None:
    """Have this process, when it is woken, wait for a free core or the end of another's turn.

    Where cores are short, whoever works finishes what it is at, and more has come together when it
    is the next one's turn: in a ring of five processes on two cores that is worth a quarter of the
    throughput. Where there is a free core it changes nothing. Who is urgent does not wait.
    """
    if os.sched_getscheduler(0) in PLAIN:
        policy = os.SCHED_OTHER if is_urgent else os.SCHED_BATCH
        os.sched_setscheduler(0, policy, os.sched_param(0))


def take_long_turns() -> None:
    """Ask for the longest turns there are, whose end nobody has to wait for who is woken.

    For who works for long at a time. It has as much of a core as before, in longer pieces.
    """
    number, policy = SYS_SCHED_SETATTR.get(platform.machine()), os.sched_getscheduler(0)
    if policy in PLAIN and number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        wanted = ATTRIBUTES.pack(ATTRIBUTES.size, policy, 0, nice, 0, LONGEST_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, wanted, 0)
