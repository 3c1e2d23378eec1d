"""Processes have turns as they ask for; how long those are is read back from the kernel."""

import ast
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os, platform
from headrace.system.cpu_scheduling import ATTRIBUTES, SYS_SCHED_SETATTR
from headrace.system.cpu_scheduling import take_long_turns, take_turns

def seen():
    found = ctypes.create_string_buffer(ATTRIBUTES.size)
    number = SYS_SCHED_SETATTR[platform.machine()] + 1  # sched_getattr
    assert ctypes.CDLL(None).syscall(number, 0, found, ATTRIBUTES.size, 0) == 0
    _, policy, _, nice, _, runtime_ns, _, _ = ATTRIBUTES.unpack(found.raw)
    return policy, nice, runtime_ns

os.nice(3)
print(seen())
take_turns(is_urgent=False)
print(seen())
take_long_turns()
print(seen())
take_turns(is_urgent=True)
print(seen())
"""


def test_turns_are_as_long_as_is_asked() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    before, batch, long, urgent = (ast.literal_eval(line) for line in result.stdout.splitlines())
    assert batch[0] == 3  # SCHED_BATCH
    assert batch[1:] == before[1:]
    assert urgent[:2] == (0, before[1])
    if before[2] == 0:
        pytest.skip("this kernel knows of no turns")
    assert long == (*batch[:2], 100_000_000)
