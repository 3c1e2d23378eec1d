"""`headrace COMMAND` runs what it names."""

import contextlib
import os
import pkgutil
import signal
import subprocess
import sys

import pytest

from headrace import __version__
from headrace.cli import main
from headrace.exit_status import ExitStatus
from headrace.launch import serve


def ignore(*_args: object) -> None:
    """Do nothing."""


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    # A server's supervisor would change this process.
    monkeypatch.setattr(serve, "setproctitle", ignore)
    monkeypatch.setattr(serve.logs, "setup", ignore)
    monkeypatch.setattr(serve.signal, "signal", ignore)
    monkeypatch.setattr(sys, "argv", ["headrace", *argv])
    main.main()


def test_every_command_exists_and_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    usage = capsys.readouterr().out
    for name, (help, where) in main.COMMANDS.items():
        assert f"  {name:8} {help}\n" in usage
        assert callable(pkgutil.resolve_name(where))


def test_a_command_gets_the_rest_of_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "chat", "--max-tokens", "many")
    assert ended.value.code == 2
    assert "argument --max-tokens: invalid int value: 'many'" in capsys.readouterr().err


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_of_a_command_names_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        run(monkeypatch, name, "--help")
    assert capsys.readouterr().out.startswith(f"usage: headrace {name} ")


def test_the_version_is_the_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--version")
    assert capsys.readouterr().out == f"headrace {__version__}\n"


def test_unknown_command_is_refused_with_all_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "serf")
    assert ended.value.code == ExitStatus.BAD_FLAGS
    why = "no command 'serf': serve, chat, bench, kv, replay, doctor"
    assert capsys.readouterr().err == f"headrace: error: {why}\n"


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "chat",
        "bench serve",
        "bench stream",
        "bench latency",
        "bench throughput",
        "replay",
        "doctor",
    ],
)
def test_unknown_flag_ends_a_command_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *command.split(), "--no-such-flag")
    assert ended.value.code == ExitStatus.BAD_FLAGS
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headrace {command}: error: ")


@pytest.mark.parametrize("is_unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--version", "doctor", "bench"])
def test_reader_of_a_part_sees_no_traceback(command: str, is_unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "headrace", command],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": is_unbuffered},
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_command_runs_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    run(monkeypatch, "--version")


@pytest.mark.parametrize("name", main.COMMANDS)
def test_interrupted_command_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def interrupted(_rest: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main.COMMANDS[name][1].replace(":", "."), interrupted)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, name)
    assert ended.value.code == 130


def test_launch_server_is_headrace_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr("headrace.launch.serve.main", asked.append)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--port", "1"])
    main.launch_server()
    assert asked == [["--port", "1"]]


@pytest.mark.slow
def test_servers_start_as_sglangs_do() -> None:
    command = [sys.executable, "-m", "headrace.launch_server", "--model-path", "/no/such"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == ExitStatus.BAD_FLAGS
    assert ended.stderr == "launch_server: error: /no/such: no such file or folder\n"
