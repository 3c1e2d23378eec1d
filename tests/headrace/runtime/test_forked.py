"""A forked child is on its own: nothing but what it is to have is left of its parent."""

import subprocess
import sys

import pytest

FORK = """
import atexit, gc, os, signal, subprocess, sys
from functools import partial
from headrace.runtime.forked import go_on, signals_held

def child():
    assert set(os.listdir("/proc/self/fd")) - {str(kept)} <= {"0", "1", "2", "3"}  # the list's
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert gc.isenabled()
    assert os.environ["OWN"] == "parent" and os.environ["OTHER"] == "child"
    atexit.register(os.write, 1, b"last words")
    %s

os.environ["OWN"] = "parent"
atexit.register(os.write, 1, b", and the parent's")
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
signal.signal(signal.SIGTERM, lambda *_: None)
kept = os.dup2(os.open(os.devnull, os.O_RDONLY), 9)
env = {"OWN": "child", "OTHER": "child"}
with signals_held():
    ended = subprocess.Popen(
        ["copy"], preexec_fn=partial(go_on, child, [kept], env), restore_signals=False
    )
print(f" {ended.wait()}", end="", flush=True)
"""


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("return", 0, ""),
        ("sys.exit(5)", 5, ""),
        ("raise SystemExit", 0, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("raise OSError('no room')", 1, "OSError: no room"),
    ],
)
def test_copy_ends_as_a_fresh_interpreter(end: str, status: int, error: str) -> None:
    ran = subprocess.run([sys.executable, "-c", FORK % end], capture_output=True, text=True)
    words = "" if status == -15 else "last words"
    assert ran.stdout == f"{words} {status}, and the parent's"
    assert ran.stderr.splitlines()[-1:] == [error] * bool(error)
