"""What is freed is kept and used again, until it is given back, or given back at once."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from pathlib import Path
from headrace.system.malloc import give_back, keep_freed

SIZE = 64 << 20
PAGE_BYTES = resource.getpagesize()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES

def use():
    before = faults()
    bytearray(b"x") * SIZE
    return faults() - before

use()
print(use() > SIZE // PAGE_BYTES // 2)
keep_freed()
use()
print(use() < 100, resident() > SIZE)
give_back()
print(resident() < SIZE)
print(use() > SIZE // PAGE_BYTES // 2)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the heap of glibc")
def test_what_is_freed_is_used_again_until_it_is_given_back() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"] * 5


LARGE = """
from pathlib import Path
import resource
from headrace.system.malloc import return_large

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

return_large()
before = resident()
for _ in range(3):  # the first to be freed would have the others come from the heap
    pieces = [bytearray(b"x") * (4 << 20) for _ in range(12)]
    last = bytearray(b"x") * (200 << 10)  # keeps the heap's end
    del pieces
print((resident() - before) < 4 << 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the heap of glibc")
def test_large_pieces_go_back_when_they_are_freed() -> None:
    result = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


PIECES = """
import resource
from headrace.system.malloc import return_large

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

return_large()
last = bytearray(b"x") * 1000
piece = bytearray(b"x") * 250_000
before = faults()
for _ in range(100):
    del piece
    piece = bytearray(b"x") * 250_000
print((faults() - before) < 100)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the heap of glibc")
def test_smaller_pieces_are_used_again() -> None:
    result = subprocess.run([sys.executable, "-c", PIECES], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr
