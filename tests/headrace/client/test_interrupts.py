"""What Ctrl-C prints of a program that does not catch it."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

DEADLINE_S = 120
MAX_LINES = 10
CLIENT = """
import sys
from headrace import Client

def main(url):
    with Client(url) as client:
        {call}

main(sys.argv[1])
"""
ASYNC_CLIENT = """
import asyncio, sys
from headrace import AsyncClient

async def main(url):
    async with AsyncClient(url) as client:
        {call}

asyncio.run(main(sys.argv[1]))
"""
ENGINE = """
from headrace import Engine

def main():
    with Engine(engine="mock", mock_profile="2ms") as engine:
        print("ready", flush=True)
        engine.generate(["a"] * 100, max_tokens=2000, ignore_eos=True, use_tqdm=False)

main()
"""
ASYNC_ENGINE = """
import asyncio
from headrace import AsyncEngine

async def main():
    async with AsyncEngine(engine="mock", mock_profile="2ms") as engine:
        async for text in engine.stream("a", max_tokens=2000, ignore_eos=True):
            print("ready", flush=True)

asyncio.run(main())
"""


@contextlib.contextmanager
def running(folder: Path, program: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program from a file, and end it whatever happens."""
    path = folder / "program.py"
    path.write_text(program)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell's background job ignores SIGINT, and so would each program that it starts.
    heeds_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, str(path), *args]
    with subprocess.Popen(command, text=True, preexec_fn=heeds_sigint, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> list[str]:
    """Interrupt a program; return the lines of its standard error."""
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGINT
    return errors.splitlines()


@pytest.mark.parametrize(
    ("program", "call"),
    [
        (CLIENT, "client.chat('Hi')"),
        (CLIENT, "list(client.stream_chat('Hi'))"),
        (ASYNC_CLIENT, "await client.chat('Hi')"),
        (ASYNC_CLIENT, "[text async for text in client.stream_chat('Hi')]"),
    ],
)
def test_interrupted_client_reports_the_place_in_short(
    tmp_path: Path, program: str, call: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with running(tmp_path, program.format(call=call), url) as process:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE_S)
                assert connection.recv(1)
                lines = told(process)
    assert len(lines) <= MAX_LINES, lines
    assert lines[-1] == "KeyboardInterrupt"
    assert any("main(" in line for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize("program", [ENGINE, ASYNC_ENGINE])
def test_interrupted_engine_reports_the_place_in_short(tmp_path: Path, program: str) -> None:
    with running(tmp_path, program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        lines = told(process)
    assert len(lines) <= MAX_LINES, lines
    assert lines[-1] == "KeyboardInterrupt"


def test_other_errors_are_reported_in_full(tmp_path: Path) -> None:
    program = "from headrace import Client\nClient()\n1 / 0\n"
    with running(tmp_path, program) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert errors.startswith("Traceback")
    assert errors.endswith("ZeroDivisionError: division by zero\n")


def test_excepthook_of_a_program_stays(tmp_path: Path) -> None:
    program = "import sys\nsys.excepthook = lambda *_: print('mine')\n"
    program += "from headrace import Client\nClient()\nraise KeyboardInterrupt\n"
    with running(tmp_path, program) as process:
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert (output, errors) == ("mine\n", "")
