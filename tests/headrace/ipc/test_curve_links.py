"""Links between machines: what comes through, and which peers do not."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from servers import wait_until

from headrace.errors import ConfigError
from headrace.ipc import curve_links
from headrace.ipc.curve_key import CurveKey, make_key, read_key
from headrace.ipc.curve_links import CurveLink, CurveListener
from headrace.ipc.sockets import wait_for_any

ANY_PORT = "tcp://127.0.0.1:*"


@pytest.fixture
def key(tmp_path: Path) -> CurveKey:
    """A new key."""
    make_key(str(tmp_path / "key"))
    return read_key(str(tmp_path / "key"))


@pytest.fixture
def listener(key: CurveKey) -> Iterator[CurveListener]:
    """A listening end."""
    opened = CurveListener(ANY_PORT, key, "--engine-listen")
    yield opened
    opened.close()


def exchange(listener: CurveListener, is_done: Callable[[], bool]) -> None:
    """Let a listener work until something is done."""

    def work() -> bool:
        wait_for_any(listener.polled, 10)
        listener.admit()
        return is_done()

    wait_until(work, "it is done")


def test_a_peer_with_the_key_is_heard_and_answered(listener: CurveListener, key: CurveKey) -> None:
    link = CurveLink(listener.where, key)
    exchange(listener, lambda: link.send([b"question", b"more"]))
    got: list[tuple[bytes, list[bytes]]] = []

    def has_come() -> bool:
        received = listener.receive()
        if received is not None:
            got.append((received[0], [bytes(frame) for frame in received[1]]))
        return bool(got)

    exchange(listener, has_come)
    ((peer, frames),) = got
    assert frames == [b"question", b"more"]
    assert listener.send(peer, [b"answer"])
    answers: list[bytes] = []

    def has_answer() -> bool:
        answers.extend(map(bytes, link.receive() or ()))
        return bool(answers)

    exchange(listener, has_answer)
    assert answers == [b"answer"]
    link.close()


def test_a_peer_with_another_key_gets_nothing_through(
    listener: CurveListener, key: CurveKey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_key(str(tmp_path / "other"))
    other = read_key(str(tmp_path / "other"))
    knows_half = CurveKey(other.secret, key.public)  # and claims to have both
    links = [CurveLink(listener.where, other), CurveLink(listener.where, knows_half)]
    num_lost = 0

    def is_refused() -> bool:
        nonlocal num_lost
        num_lost += sum(link.lost_connections() for link in links)
        return num_lost >= 2 * len(links)

    exchange(listener, is_refused)
    assert not any(link.send([b"question"]) for link in links)
    assert listener.receive() is None
    exchange(listener, lambda: bool(caplog.records))
    assert len(caplog.records) == 1
    for link in links:
        link.close()


def test_a_peer_with_a_valid_pair_of_its_own_is_refused(
    listener: CurveListener, key: CurveKey, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.immediate = True
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = key.public
        stranger.connect(listener.where)
        exchange(listener, lambda: bool(caplog.records))
        with pytest.raises(zmq.Again):
            stranger.send(b"question", zmq.NOBLOCK)
    assert listener.receive() is None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, key: CurveKey) -> Iterator[CurveListener]:
    """A listening end for small frames, that does not hurry handshakes."""
    monkeypatch.setattr(curve_links, "MAX_FRAME_BYTES", 1 << 16)
    monkeypatch.setattr(curve_links, "HANDSHAKE_MS", 600_000)
    opened = CurveListener(ANY_PORT, key, "--engine-listen")
    yield opened
    opened.close()


def test_a_frame_that_is_too_large_ends_its_connection_alone(
    small: CurveListener, key: CurveKey
) -> None:
    links = [CurveLink(small.where, key) for _ in range(2)]
    largest = bytes(curve_links.MAX_FRAME_BYTES)
    exchange(small, lambda: links[0].send([b"", largest]))
    got: list[int] = []

    def has_come() -> bool:
        received = small.receive()
        got.extend([] if received is None else [len(received[1][1])])
        return bool(got)

    exchange(small, has_come)
    links[0].lost_connections()
    assert links[0].send([b"", largest + bytes(64)])
    exchange(small, lambda: bool(links[0].lost_connections()))
    exchange(small, lambda: links[1].send([b"", b"next"]))
    exchange(small, lambda: has_come() and len(got) > 1)
    assert got == [len(largest), len(b"next")]
    for link in links:
        link.close()


def test_a_stranger_that_announces_a_large_frame_is_cut_off(small: CurveListener) -> None:
    """Before it has shown a key."""
    host, _, port = small.where.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    command = b"\x06" + (1 << 33).to_bytes(8)
    with socket.create_connection((host, int(port)), timeout=60) as stranger:
        stranger.sendall(greeting + command + bytes(64))
        with suppress(ConnectionResetError):
            while stranger.recv(1 << 16):
                pass


def test_a_message_to_a_peer_that_is_gone_is_refused(listener: CurveListener) -> None:
    assert not listener.send(b"none", [b"answer"])


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key(str(path))
    first = read_key(str(path))
    make_key(str(path))
    assert read_key(str(path)) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first.secret.decode() not in repr(first)
    assert os.listdir(tmp_path) == ["key"]


def test_a_key_file_is_whole_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def end(_source: str, _path: str) -> None:
        raise Killed

    path = str(tmp_path / "key")
    with monkeypatch.context() as patch:
        patch.setattr("os.link", end)
        with pytest.raises(Killed):
            make_key(path)
    assert not os.path.lexists(path)
    make_key(path)
    assert len(read_key(path).secret) == 40


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (None, 0, "copy the file"),
        ("x", 0o600, "has 1 characters"),
        ("x" * 40, 0o644, "chmod 600"),
        ("\xff" * 40, 0o600, "has no key"),
    ],
)
def test_files_without_a_key_are_refused(
    tmp_path: Path, text: str | None, mode: int, why: str
) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
        os.chmod(path, mode)
    with pytest.raises(ConfigError, match=why):
        read_key(str(path))


def test_an_address_in_use_is_refused(key: CurveKey) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^--engine-listen {where} cannot be bound"):
            CurveListener(where, key, "--engine-listen")
