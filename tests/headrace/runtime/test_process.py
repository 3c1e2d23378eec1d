"""How processes end that cannot start or are told to, and what one that starts gets on by."""

import contextlib
import dataclasses
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servers import wait_until

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField
from headrace.config.process_configs import ModelCard, TokenizerConfig
from headrace.exit_status import ExitStatus
from headrace.runtime.process import Context, spawn

DEADLINE_S = 120
ENDING_S = 60  # for what ends at once
SEAT = Seat("tokenizer", 0)
CARD = ModelCard(
    path="",
    name="",
    max_model_len=1,
    vocab_size=1,
    eos_token_ids=[],
    chat_template=None,
    special_tokens={},
)
CONFIG = TokenizerConfig(
    run_dir="/missing",
    cards=(CARD,),
    num_frontends=1,
    num_detokenizers=1,
    seed=0,
    started_at=0,
    num_tokenizers=0,
    max_batch_size=1,
    batch_wait_ms=0,
)
DEAF = """
import signal
from headrace.board.board import Board, Seat
from headrace.runtime.process import Context
board = Board.create([Seat("engine", 0)])
Context(board.slots[0].seat, board, board.slots[0], "info", 0).ready()
said = "ready"
while True:
    try:
        print(said, flush=True)
        signal.pause()
    except SystemExit:  # as where a library calls back
        said = "lost"
"""

BUSY = """
import ctypes
import threading
from headrace.board.board import Board, Seat
from headrace.runtime.process import Context
board = Board.create([Seat("tokenizer", 0)])
Context(board.slots[0].seat, board, board.slots[0], "info", 0).ready()
threading.Thread(target=threading.Event().wait).start()  # Python waits for it at its end
print("ready", flush=True)
ctypes.PyDLL(None).sleep(3600)  # native code that keeps the interpreter's lock
"""

FAILING = """
import signal
import threading
from headrace.board.board import Board, Seat
from headrace.logs import setup
from headrace.runtime.process import end_with_threads
board = Board.create([Seat("engine", 0)])
end_with_threads(board.slots[0], setup("engine", "info"))
threading.Thread(target={}.pop, daemon=True).start()
signal.pause()
"""


def test_start_refused_by_the_system_ends_without_traceback() -> None:
    board = Board.create([SEAT, Seat("frontend", 0)])
    assert spawn(SEAT, CONFIG, board, "info").wait(DEADLINE_S) == ExitStatus.SHORT_OF
    words = board.slots[0].exit_reason
    assert words.startswith("[Errno 2] No such file or directory")
    assert "ipc:///missing/tokenizer-0.sock" in words


@pytest.mark.parametrize("is_short_of_files", [True, False])
def test_failed_start_leaves_no_file_open(
    is_short_of_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board.create([SEAT])
    create = os.memfd_create

    def refuse_notes(name: str, *flags: int) -> int:
        if name == "headrace-note":
            raise OSError(errno.EMFILE, "too many open files")
        return create(name, *flags)

    if is_short_of_files:
        monkeypatch.setattr(os, "memfd_create", refuse_notes)
    else:
        monkeypatch.setattr(sys, "executable", "/missing")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="open files" if is_short_of_files else "/missing"):
        spawn(SEAT, CONFIG, board, "info")
    assert set(os.listdir("/proc/self/fd")) <= set(before)  # what others left may be closed


@pytest.mark.parametrize(
    ("own", "count"),
    [
        ({}, "5000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, None),  # which a count would override
    ],
)
def test_threads_of_libraries_spin_briefly_by_default(
    own: dict[str, str], count: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nenv > "$0.env"\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    process = spawn(SEAT, CONFIG, Board.create([SEAT]), "info")
    assert process.wait(DEADLINE_S) == 0
    process.stacks.close()
    lines = (tmp_path / "program.env").read_text().splitlines()
    environment = dict(line.split("=", 1) for line in lines if "=" in line)
    assert environment.get("GOMP_SPINCOUNT") == count


def test_waiter_progresses_as_long_as_its_peer() -> None:
    seats = [Seat("worker", 0), Seat("worker", 1), Seat("engine", 0)]
    board = Board.create(seats)
    own, other, engine = board.slots
    context = Context(own.seat, board, own, "error", os.getppid())
    seen = [context.progress()]
    engine[CommonField.PROGRESS] += 1
    assert context.progress() == seen[-1]
    for slot in (own, other):
        slot[CommonField.PROGRESS] += 1
        assert context.progress() != seen[-1]
        seen.append(context.progress())
    other[CommonField.PID] = os.getpid()  # and what it has in memory counts
    assert context.progress() != seen[-1]
    other[CommonField.STATE] = State.READY
    seen.append(context.progress())
    other[CommonField.PROGRESS] += 1
    assert context.progress() == seen[-1], "a process that serves loads nothing"


def test_starting_process_is_ended_by_the_kernel(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    os.mkfifo(tokenizer)  # loading it never ends
    card = dataclasses.replace(CARD, path=str(tmp_path))
    config = dataclasses.replace(CONFIG, run_dir=str(tmp_path), cards=(card,), num_tokenizers=1)
    process = spawn(SEAT, config, Board.create([SEAT, Seat("frontend", 0)]), "info")
    opened: list[int] = []

    def is_loading() -> bool:
        with contextlib.suppress(OSError):  # the FIFO has no reader yet
            opened.append(os.open(tokenizer, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    wait_until(is_loading, "it loads its tokenizer", DEADLINE_S)
    process.terminate()
    assert process.wait(DEADLINE_S) == -signal.SIGTERM
    os.close(opened[0])


def test_process_that_missed_sigterm_ends_at_the_next() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for said in (b"ready\n", b"lost\n"):
            assert process.stdout.readline() == said
            process.terminate()
        assert process.wait(DEADLINE_S) == -signal.SIGTERM


def test_a_process_in_native_code_ends_on_sigterm() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        try:
            assert process.wait(ENDING_S) == -signal.SIGTERM
        finally:
            process.kill()


def test_failing_thread_ends_its_process_with_the_reason() -> None:
    command = [sys.executable, "-c", FAILING]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == ExitStatus.FAILED
    assert "engine ERROR unexpected error\nTraceback" in ended.stderr
    assert "TypeError: pop expected at least 1 argument" in ended.stderr
