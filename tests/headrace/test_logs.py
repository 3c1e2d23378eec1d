"""The log: a line per event; a slow reader blocks no process."""

import os
import subprocess
import sys
from pathlib import Path

from headrace import logs

DEADLINE_S = 120
CODE = """
import logging, sys
from headrace import logs
logs.setup("engine", "info")
for number in range(int(sys.argv[1])):
    logging.getLogger("x").info("%d %s", number, "." * 100)
print("done", flush=True)
input()
logging.getLogger("x").info("the last")
"""


def start(stderr: int, num_lines: int = 5 * logs.MAX_LINES) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(num_lines)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def test_lines_are_written_in_order_to_the_last() -> None:
    process = start(subprocess.PIPE, num_lines=logs.MAX_LINES - 1)
    _, log = process.communicate("\n", timeout=DEADLINE_S)
    lines = log.splitlines()
    assert [line.split()[3] for line in lines[:-1]] == [str(n) for n in range(logs.MAX_LINES - 1)]
    assert lines[-1].endswith("the last")


def test_every_line_is_written_or_counted() -> None:
    process = start(subprocess.PIPE)
    _, log = process.communicate("\n", timeout=DEADLINE_S)
    lines = log.splitlines()
    losses = [int(line.split()[0]) for line in lines if "log lines were lost" in line]
    assert len(lines) - len(losses) + sum(losses) == 5 * logs.MAX_LINES + 1


def test_unread_log_blocks_nothing_and_counts_lost_lines() -> None:
    reader, writer = os.pipe()
    process = start(writer)
    os.close(writer)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "done\n"
    with os.fdopen(reader) as log:
        while "log lines were lost" not in log.readline():
            pass
        process.stdin.write("\n")
        process.stdin.close()
        log.read()  # as far as there was room for them, every line
    assert process.wait(DEADLINE_S) == 0
    process.stdout.close()


def test_process_ends_with_an_unread_log() -> None:
    reader, writer = os.pipe()
    process = start(writer)
    process.communicate("\n", timeout=DEADLINE_S)
    assert process.returncode == 0
    os.close(reader)
    os.close(writer)


def test_unformattable_log_record_fails_nothing() -> None:
    code = (
        "import logging; from headrace import logs; logs.setup('engine', 'info')\n"
        "logging.info('%d', 'no number'); logging.info('and on')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0
    assert "TypeError" in done.stderr
    assert "engine INFO and on" in done.stderr


def test_a_log_on_a_full_disk_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = (
        "import logging, os, resource, signal\n"
        "from headrace import logs\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"
        "logs.setup('engine', 'info')\n"
        "writer = logging.getLogger().handlers[0]\n"
        "logging.info('for which there is no room')\n"
        "while not writer._num_unwritten: pass\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "logging.info('for which there is')\n"
    )
    with path.open("wb") as file:
        done = subprocess.run([sys.executable, "-c", code], stderr=file, timeout=DEADLINE_S)
    assert done.returncode == 0
    first, second = path.read_text().splitlines()
    assert first.endswith("for which there is")
    assert second.startswith("1 log lines were lost")
