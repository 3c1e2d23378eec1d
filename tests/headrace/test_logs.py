"""The log: a line per event; a slow reader blocks no process."""

import json
import logging
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

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


def record_of(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("x").makeRecord(
        "x", logging.INFO, "x.py", 1, message, args, extra.pop("exc_info", None), extra=extra
    )


def test_text_line_ends_with_the_id_of_its_request() -> None:
    formatter = logs.TextFormatter("engine")
    line = formatter.format(record_of("it %s", "fails", **logs.about("abc")))
    assert line.endswith("engine INFO it fails (request abc)")
    assert formatter.format(record_of("all is well")).endswith("engine INFO all is well")


def test_json_line_is_an_object_with_its_request() -> None:
    formatter = logs.JsonFormatter("tokenizer 0")
    line = formatter.format(record_of("it\n%s", "\udcff fails", **logs.about("abc", status=500)))
    assert "\n" not in line
    found = json.loads(line)
    assert datetime.fromisoformat(found.pop("time")).tzinfo is not None
    assert found == {
        "level": "info",
        "process": "tokenizer 0",
        "message": "it\n\udcff fails",
        "request_id": "abc",
        "status": 500,
    }


def test_json_line_has_the_exception_as_a_string() -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        record = record_of("it fails", exc_info=sys.exc_info())
    found = json.loads(logs.JsonFormatter("engine").format(record))
    assert found["message"] == "it fails"
    assert found["exception"].endswith("KeyError: 'lost'")


def test_line_of_a_thread_has_the_request_it_works_at() -> None:
    logs.current_request().id = "abc"
    try:
        found = json.loads(logs.JsonFormatter("tokenizer 0").format(record_of("it is long")))
    finally:
        logs.current_request().id = ""
    assert found["request_id"] == "abc"


def test_failure_hides_the_text_of_its_error_in_json() -> None:
    code = (
        "import logging; from headrace import logs\n"
        "logs.setup('engine', 'info', 'json')\n"
        "try: raise ValueError('sec' + 'ret')\n"  # 3.13 quotes the line
        "except ValueError as error:\n"
        "    logs.log_failure(logging.getLogger('x'), 'it fails', error, 'abc')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    found = json.loads(done.stderr)
    assert (found["message"], found["request_id"]) == ("it fails: ValueError", "abc")
    assert "line 3" in found["exception"]
    assert "secret" not in done.stderr


def test_no_thread_runs_before_the_first_line() -> None:
    code = (
        "import logging, threading; from headrace import logs\n"
        "logs.setup('supervisor', 'info')\n"
        "print(threading.active_count())\n"
        "logging.warning('said')\n"
        "print(threading.active_count())\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.split() == ["1", "2"]
    assert done.stderr.endswith("supervisor WARNING said\n")
