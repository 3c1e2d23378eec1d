"""What a machine may be short of: each ends in one clear line, or in a server that is right."""

import contextlib
import os
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from mounts import has_mounts
from mutants.mutants import mutants
from servers import PATIENCE_S, START_S, RunningServer, StartFailed, wait_until

from headrace.exit_status import ExitStatus
from headrace.runtime.run_directory import is_alive
from support.ports import reserved_port

LAUNCH = str(Path(sys.executable).parent / "launch_server")
MOCK = ("--port", "0", "--engine", "mock")
BODY = {"prompt": "x", "max_tokens": 2}


def refused(setup: str, status: int, *args: str, env: dict[str, str] | None = None) -> str:
    """Start a server within a shell that has been set up; return the one line it ends with."""
    shell = ["unshare", "--mount", "bash"] if "mount" in setup else ["bash"]
    result = subprocess.run(
        [*shell, "-ec", f"{setup}\nexec {shlex.join([LAUNCH, *args])}"],
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**os.environ, **(env or {})},
    )
    assert result.returncode == status
    (line,) = result.stderr.splitlines()
    assert line.startswith("launch_server: error: ")
    return line


def completes(url: str, uds: str | None = None) -> bool:
    """Whether a server answers."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=uds), timeout=PATIENCE_S) as client:
        return client.post(f"{url}/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        ("ulimit -n 64", "64 files open (ulimit -n); a server of 6 processes needs 88, and one"),
        ("ulimit -f 0", "cannot share memory: File too large; look at ulimit -f"),
    ],
)
def test_a_limit_that_is_too_low_is_named(setup: str, says: str) -> None:
    assert says in refused(setup, ExitStatus.BAD_FLAGS, *MOCK)


@has_mounts
def test_a_disk_without_room_for_sockets_is_named(socket_folder: Path) -> None:
    mount = f"mount -t tmpfs -o size=16k,nr_inodes=4 none {socket_folder}"
    line = refused(mount, ExitStatus.SHORT_OF, *MOCK, env={"TMPDIR": str(socket_folder)})
    assert "No space left on device" in line
    assert f"{socket_folder}/headrace-" in line, "a socket or a file beside it"


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(
        '{"model_type":"llama","max_position_embeddings":64,"vocab_size":9}'
    )


def lose_config(path: Path) -> None:
    (path / "config.json").mkdir(parents=True)


def lose_tokenizer(path: Path) -> None:
    make_folder(path)
    (path / "tokenizer.json").mkdir()


def lose_template(path: Path) -> None:
    make_folder(path)
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").mkdir()


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lose_config, "model/config.json: cannot be read: Is a directory"),
        (lose_tokenizer, "model/tokenizer.json: cannot be read: Is a directory"),
        (lose_template, "model/chat_template.jinja: cannot be read: [Errno 21] Is a directory"),
    ],
)
def test_a_model_that_cannot_be_read_is_named(harm: object, says: str, tmp_path: Path) -> None:
    assert callable(harm)
    harm(tmp_path / "model")
    line = refused("", ExitStatus.BAD_MODEL, *MOCK, str(tmp_path / "model"))
    assert f"{tmp_path}/{says}" in line


def test_concurrent_starts_give_the_port_to_one_server(
    socket_folder: Path,
) -> None:
    def start(port: int) -> RunningServer | str:
        try:
            return RunningServer(
                "--engine", "mock", "--port", str(port), env={"TMPDIR": str(socket_folder)}
            )
        except StartFailed as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool, reserved_port() as port:
        outcomes = list(pool.map(start, [port, port]))
    (winner,) = (outcome for outcome in outcomes if isinstance(outcome, RunningServer))
    (loser,) = (outcome for outcome in outcomes if isinstance(outcome, str))
    assert loser.count("\n") == 1
    assert f"cannot listen on --host 127.0.0.1 --port {port}: Address already in use" in loser
    assert completes(winner.url)
    winner.close()
    assert not list(socket_folder.iterdir())


def test_server_with_full_log_disk_serves_without_tmpdir(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, Path("/dev/full").open("w") as log:
        uds = f"{folder}/x.sock"
        process = subprocess.Popen(
            [LAUNCH, *MOCK, "--uds", uds],
            stderr=log,
            env=os.environ | {"TMPDIR": str(tmp_path / "missing")},
        )

        wait_until(lambda: is_alive(uds), "it listens", START_S)
        assert completes("http://localhost", uds)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@has_mounts
def test_a_full_dev_shm_is_nothing_to_a_server() -> None:
    fill = "mount -t tmpfs -o size=4k none /dev/shm; head -c 4k /dev/zero > /dev/shm/full"
    own_mounts = ("unshare", "--mount", "bash", "-c", f'{fill}; exec "$@"', "bash")
    running = RunningServer(under=own_mounts)
    assert completes(running.url)
    assert running.stop() == 0


@pytest.fixture(scope="module")
def mock_server() -> Iterator[RunningServer]:
    running = RunningServer("--engine", "mock", env=mutants("supervisor=tireless"))
    yield running
    assert running.stop() == 0


@contextlib.contextmanager
def no_more_files(process: psutil.Process) -> Iterator[None]:
    """Let a process open no file that it has not open."""
    limits = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds(), limits[1]))
    try:
        yield
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, limits)


def test_frontend_out_of_files_keeps_clients_and_recovers(
    mock_server: RunningServer,
) -> None:
    assert completes(mock_server.url)  # so what a first request opens is open
    frontend = mock_server.ring["headrace: frontend 0"]
    address = httpx.URL(mock_server.url)
    for_ever = httpx.Limits(keepalive_expiry=None)
    with httpx.Client(timeout=PATIENCE_S, limits=for_ever) as old:
        assert old.get(f"{mock_server.url}/health").status_code == 200
        clients = []
        with no_more_files(frontend):
            for _ in range(8):
                clients.append(socket.create_connection((address.host, address.port)))
            answer = old.post(f"{mock_server.url}/v1/completions", json=BODY)
            assert answer.status_code == 200
            assert old.get(f"{mock_server.url}/health").status_code == 200
        for client in clients:
            client.close()
        assert completes(mock_server.url)
    assert mock_server.ring["headrace: frontend 0"].pid == frontend.pid


def test_a_process_that_cannot_be_replaced_now_is_replaced_later(
    mock_server: RunningServer,
) -> None:
    with no_more_files(psutil.Process(mock_server.process.pid)):
        mock_server.ring["headrace: detokenizer 0"].kill()
        wait_until(lambda: says(mock_server, "; trying again"), "it cannot")
    wait_until(lambda: httpx.get(f"{mock_server.url}/health").status_code == 200, "it can")
    assert completes(mock_server.url)


def says(server: RunningServer, text: str) -> bool:
    """Read on in a server's log, and return whether it has said something."""
    server.read_log(time.monotonic() + START_S)
    return text in server.log
