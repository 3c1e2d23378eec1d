"""Starts from unusual surroundings: closed descriptors, as PID 1, as a subreaper."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from servers import PATIENCE_S, RunningServer, survivors, wait_until

from headrace import __version__
from headrace.exit_status import ExitStatus
from headrace.runtime.run_directory import is_alive

MOCK = ("--engine", "mock")
CLOSED = [(0,), (1,), (2,), (0, 1, 2)]
LAUNCH = str(Path(sys.executable).parent / "launch_server")
# Closes descriptors, then becomes a program.
CLOSING = (
    "import os, sys; [os.close(int(fd)) for fd in sys.argv[1]]; os.execv(sys.argv[2], sys.argv[2:])"
)
# Has a child that outlives its parent, adopts it, and becomes a program.
ADOPTING = """
import ctypes, os, sys
if os.getpid() != 1:
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
if os.fork() == 0:
    if os.fork() == 0:
        os.execvp("sleep", ["orphan", "0.01"])
    os._exit(0)
os.wait()
os.execv(sys.argv[1], sys.argv[1:])
"""
PID_1 = ("unshare", "--pid", "--fork", "--mount-proc")


def streams_of(process: psutil.Process) -> list[str]:
    """Return what descriptors 0 to 2 of a process are."""
    return [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in range(3)]


@pytest.mark.parametrize("closed", CLOSED, ids=lambda fds: "".join(map(str, fds)))
def test_a_server_starts_with_standard_streams_closed(
    closed: tuple[int, ...], socket_folder: Path
) -> None:
    where = str(socket_folder / "server.sock")
    closing = [sys.executable, "-c", CLOSING, "".join(map(str, closed))]
    command = [*closing, LAUNCH, *MOCK, "--uds", where]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        transport = httpx.HTTPTransport(uds=where)
        with httpx.Client(transport=transport, base_url="http://server") as client:
            wait_until(lambda: process.poll() is not None or is_alive(where), "it listens")
            assert process.poll() is None
            wait_until(lambda: client.get("/health").status_code == 200, "it serves")
            body = {"prompt": "x", "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200
        supervisor = psutil.Process(process.pid)
        ring = [supervisor, *supervisor.children(recursive=True)]
        for one in ring:
            streams = streams_of(one)
            assert all(streams[fd] == "/dev/null" for fd in closed), (one.cmdline(), streams)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == ExitStatus.TOLD
    assert not survivors(ring)


@pytest.mark.parametrize("command", [["launch_server"], ["headrace", "serve"]])
def test_a_start_that_fails_without_streams_has_its_status(command: list[str]) -> None:
    program = str(Path(sys.executable).parent / command[0])
    flags = [*command[1:], "--port", "-1"]
    ended = subprocess.run([sys.executable, "-c", CLOSING, "012", program, *flags])
    assert ended.returncode == ExitStatus.BAD_FLAGS


@pytest.mark.parametrize("command", [["launch_server"], ["headrace", "serve"], ["headrace"]])
def test_version_is_reported(command: list[str]) -> None:
    program = str(Path(sys.executable).parent / command[0])
    told = subprocess.run([program, *command[1:], "--version"], capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (0, f"headrace {__version__}\n")


def can_be_pid_1() -> bool:
    """Whether this user may make a namespace of processes."""
    try:
        return subprocess.run([*PID_1, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_orphans_are_reaped() -> None:
    running = RunningServer(*MOCK, under=(sys.executable, "-c", ADOPTING))
    supervisor = psutil.Process(running.process.pid)
    try:
        wait_until(lambda: not zombies(supervisor), "no orphan is left")
        assert running.stop() == ExitStatus.TOLD
    finally:
        running.close()


def zombies(process: psutil.Process) -> list[psutil.Process]:
    """Return the children of a process that have ended and are not waited for."""
    return [child for child in process.children() if child.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(not can_be_pid_1(), reason="no namespace of processes can be made")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_pid_1_takes_signals_and_reaps(number: signal.Signals) -> None:
    running = RunningServer(*MOCK, under=(*PID_1, sys.executable, "-c", ADOPTING))
    try:
        (supervisor,) = psutil.Process(running.process.pid).children()  # of unshare
        ring = supervisor.children(recursive=True)
        wait_until(lambda: not zombies(supervisor), "no orphan is left")
        tokenizer = next(p for p in ring if p.name().startswith("headrace: token"))
        tokenizer.kill()
        wait_until(lambda: not tokenizer.is_running(), "the dead tokenizer is reaped")
        supervisor.send_signal(number)
        assert running.wait() == ExitStatus.TOLD
        assert not survivors(ring)
    finally:
        running.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--uds", b"a\xff.sock"], r"--uds 'a\udcff.sock' is not UTF-8"),
        (["--api-key", b"k\xff"], "--api-key is not UTF-8"),
        (["--max-body-bytes", "9223372036854775807"], "it must be at most 1099511627776"),
        (["--max-num-seqs", "9223372036854775807"], "it must be at most 16777216"),
        (["--host", ""], "--host is empty"),
        ([""], "MODEL is empty"),
        (["a\nb.gguf"], "a b.gguf: no such file or folder"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str | bytes], says: str) -> None:
    ended = subprocess.run([LAUNCH, *MOCK, "--port", "0", *arguments], capture_output=True)
    assert ended.returncode == ExitStatus.BAD_FLAGS
    error = ended.stderr.decode()
    assert error.startswith("launch_server: error: ")
    assert says in error
    assert error.count("\n") == 1
