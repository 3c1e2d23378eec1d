"""Peers without a key at the TCP ports of processes: scans, garbage, another key."""

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil
from servers import wait_until

from headrace.ipc.curve_key import make_key, read_key
from headrace.ipc.curve_links import CurveLink

NUM_SCANS = 20
GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f")
CLOSES_S = 60
LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def tcp_ports(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the ports at which processes listen, in whatever network namespace."""
    return {port for process in processes for port in ports_of(Path("/proc", str(process.pid)))}


def ports_of(process: Path) -> set[int]:
    """Return the ports at which a process listens, by its folder; none where it has ended.

    psutil knows the sockets of its own namespace alone.
    """
    found, own = set[int](), set[str]()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                own.add(os.readlink(fd))
        for table in ("tcp", "tcp6"):
            for line in (process / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == LISTENS and f"socket:[{inode}]" in own:
                    found.add(int(local.rsplit(":", 1)[1], 16))
    return found


def scan(host: str, port: int) -> None:
    """Connect and leave, and send what is no message until the other end closes."""
    for _ in range(NUM_SCANS):
        socket.create_connection((host, port)).close()
    for data in GARBAGE:
        with socket.create_connection((host, port)) as peer:
            peer.sendall(data * 4)
            peer.settimeout(CLOSES_S)
            with contextlib.suppress(ConnectionResetError):
                while peer.recv(4096):  # the greeting; then it closes the connection
                    pass


def knock(host: str, port: int, folder: Path) -> None:
    """Come with another key until that is refused.

    Args:
        folder: for the key.
    """
    key_file = str(folder / "strange key")
    make_key(key_file)
    link = CurveLink(f"tcp://{host}:{port}", read_key(key_file))
    wait_until(lambda: bool(link.lost_connections()), "another key is refused")
    assert not link.send([b"question"])
    link.close()
