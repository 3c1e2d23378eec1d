"""A process of Ray's on a node, whose child is a server without HTTP: one engine.

It starts the child and watches it. The child ends with it, however it ends.
"""

import os
import socket
import subprocess
import sys
import threading
from typing import Any

import msgspec
import ray

from headrace.errors import HeadraceError
from headrace.exit_status import ending
from headrace.ipc.schema_fingerprint import code_version

ERROR = "launch_server: error: "
UNDER = ("-m", "headrace.engine_proc.placement.with_parent")
SET_BY_RAY = "OMP_NUM_THREADS"  # by the CPUs that it gives; workers know their share themselves
JOIN_S = 5.0


class NodeError(HeadraceError):
    """An engine cannot run on this node."""


class EngineActor:
    """One engine of a node."""

    def __init__(self) -> None:
        self._holder = socket.socket()
        self._last_line = ""

    def start(self, version: str, flags: dict[str, Any], key: bytes) -> str:
        """Start the child; return where it listens.

        The key and the flags are files in memory of this process, which the child opens by path.

        Args:
            version: of the server's code.

        Raises:
            NodeError: this node has another one.
        """
        if version != code_version():
            raise NodeError(
                f"needs headrace {version}, and {node_address()} has {code_version()}; install the "
                "server's version there"
            )
        key_file = memory_file("headrace-key", key)
        config_file = memory_file("headrace-flags", msgspec.json.encode(flags))
        where = self._reserve()
        listen = ("--engine-listen", where, "--engine-key-file", key_file)
        self._child = subprocess.Popen(
            [sys.executable, *UNDER, str(os.getpid()), *listen, "--config", config_file],
            env={name: value for name, value in os.environ.items() if name != SET_BY_RAY},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._relay = threading.Thread(target=self._relay_log, daemon=True)
        self._relay.start()
        return where

    def wait(self) -> str:
        """Wait for the end of the child; return how it ended."""
        how = ending(self._child.wait())
        self._relay.join(JOIN_S)
        if not self._last_line.startswith(ERROR):
            return how
        return f"{how} ({self._last_line.removeprefix(ERROR)} on {node_address()})"

    def _reserve(self) -> str:
        """Return an address of this node whose port no other process is given meanwhile."""
        host = node_address()
        self._holder.close()
        self._holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind((host, 0))
        port = self._holder.getsockname()[1]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def _relay_log(self) -> None:
        """Have the child's log in that of this process, which Ray keeps on the node."""
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self._last_line = line.strip()
            sys.stderr.write(line)


def node_address() -> str:
    """Return the address of this node in the cluster."""
    return str(ray.util.get_node_ip_address())


def memory_file(name: str, content: bytes) -> str:
    """Return the path of a file for processes of this user, as long as this process lives."""
    fd = os.memfd_create(name)
    os.fchmod(fd, 0o600)
    os.write(fd, content)
    return f"/proc/{os.getpid()}/fd/{fd}"
