"""The sockets of a server: bound once, shared by its frontends, gone with it."""

import contextlib
import fcntl
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace.supervision.listeners as listeners_module
from headrace.config.config import ServerConfig
from headrace.errors import ConfigError
from headrace.supervision.listeners import Listeners, listen
from support.ports import reserved_port


@pytest.fixture
def opened() -> "list[Listeners]":
    return []


@pytest.fixture(autouse=True)
def closed(opened: list[Listeners]) -> "object":
    yield
    for listeners in opened:
        listeners.close()


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as reserved:
        yield reserved


def port_of(listeners: Listeners) -> int:
    port: int = listeners.sockets[0].getsockname()[1]
    return port


def test_port_zero_takes_a_free_port(opened: list[Listeners]) -> None:
    opened += [listen(ServerConfig(port=0)), listen(ServerConfig(port=0))]
    one, other = map(port_of, opened)
    assert 0 != one != other != 0
    assert opened[0].url == f"http://127.0.0.1:{one}"


def test_frontends_share_a_port(opened: list[Listeners]) -> None:
    opened += [listen(ServerConfig(port=0, frontend_procs=3))]
    ports = {listener.getsockname()[1] for listener in opened[0].sockets}
    assert len(opened[0].sockets) == 3
    assert len(ports) == 1


def test_the_kernel_spreads_connections_over_the_frontends(opened: list[Listeners]) -> None:
    opened += [listen(ServerConfig(port=0, frontend_procs=3))]
    clients = [socket.create_connection(("127.0.0.1", port_of(opened[0]))) for _ in range(64)]
    counts = []
    for listener in opened[0].sockets:
        listener.setblocking(False)
        counts.append(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
                counts[-1] += 1
    for client in clients:
        client.close()
    assert sum(counts) == 64
    assert min(counts) > 0


@pytest.mark.parametrize(("frontend_procs", "at_socket"), [(1, 1), (2, 1), (2, 2)])
def test_of_servers_that_start_at_once_one_gets_the_port(
    frontend_procs: int, at_socket: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(port=port, frontend_procs=frontend_procs)
    winners: list[Listeners] = []
    num_bound = 0
    start_listening = listeners_module.started

    def started(listener: socket.socket) -> socket.socket:
        """Have another server start just before one's socket begins to listen."""
        nonlocal num_bound
        num_bound += 1
        if num_bound == at_socket:
            with contextlib.suppress(ConfigError):
                winners.append(listen(config))
        return start_listening(listener)

    monkeypatch.setattr(listeners_module, "started", started)
    with contextlib.suppress(ConfigError):
        winners.append(listen(config))
    for winner in winners:
        winner.close()
    assert len(winners) == 1


@pytest.mark.parametrize("frontend_procs", [1, 2])
def test_a_taken_port_is_refused_with_its_flags(
    opened: list[Listeners], frontend_procs: int
) -> None:
    opened += [listen(ServerConfig(port=0, frontend_procs=frontend_procs))]
    port = port_of(opened[0])
    with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: Address already"):
        listen(ServerConfig(port=port, frontend_procs=frontend_procs))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1 "):
        listen(ServerConfig(host="192.0.2.1", port=0))


@pytest.mark.parametrize(
    ("host", "says"),
    [("", "--host is empty; "), ("x" * 300, "cannot listen on --host x"), ("h\udcff", "not ")],
)
def test_what_is_no_host_is_refused(host: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        listen(ServerConfig(host=host, port=0))


def test_a_path_is_listened_at_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "headrace.sock"
    listeners = listen(ServerConfig(uds=str(path), frontend_procs=2))
    assert len(listeners.sockets) == 2
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listeners.close()
    assert not path.exists()
    listeners.close()


def test_a_path_that_a_dead_server_left_is_taken_over(
    tmp_path: Path, opened: list[Listeners]
) -> None:
    path = str(tmp_path / "headrace.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    opened += [listen(ServerConfig(uds=path))]
    with pytest.raises(ConfigError, match=f"--uds {path}: Address already in use"):
        listen(ServerConfig(uds=path))


def test_path_about_to_be_listened_at_is_not_taken_for_dead(
    tmp_path: Path, opened: list[Listeners], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_listening = listeners_module.started
    folder = os.open(tmp_path, os.O_RDONLY)

    def started(listener: socket.socket) -> socket.socket:
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return start_listening(listener)

    monkeypatch.setattr(listeners_module, "started", started)
    opened += [listen(ServerConfig(uds=str(tmp_path / "headrace.sock")))]
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)


def test_a_path_where_something_else_is_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="--uds"):
        listen(ServerConfig(uds=str(path)))
    assert path.read_text() == "mine"


def test_a_key_without_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ssl-keyfile needs --ssl-certfile"):
        listen(ServerConfig(port=0, ssl_keyfile="key.pem"))


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    with pytest.raises(ConfigError, match=rf"--ssl-certfile {path} cannot be used: No such file"):
        listen(ServerConfig(port=0, ssl_certfile=str(path)))
    path.write_text("nonsense")
    with pytest.raises(ConfigError, match=rf"--ssl-certfile {path} cannot be used"):
        listen(ServerConfig(port=0, ssl_certfile=str(path)))


def test_a_certificate_and_its_key_swapped_are_explained(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    make += ["-nodes", "-subj", "/CN=localhost", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    swapped = ServerConfig(port=0, ssl_certfile=str(key), ssl_keyfile=str(certificate))
    with pytest.raises(ConfigError, match="they must be a certificate and the key that goes with"):
        listen(swapped)
    encrypted = tmp_path / "encrypted.pem"
    encrypt = ["openssl", "pkey", "-aes128", "-passout", "pass:secret", "-in", str(key)]
    subprocess.run([*encrypt, "-out", str(encrypted)], check=True, capture_output=True)
    with pytest.raises(
        ConfigError, match=r"encrypted\.pem: the key is encrypted; give one without"
    ):
        listen(ServerConfig(port=0, ssl_certfile=str(certificate), ssl_keyfile=str(encrypted)))
