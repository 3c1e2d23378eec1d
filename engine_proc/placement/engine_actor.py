"""A process of Ray's on a node. Its child is a server without HTTP, or a stage of a pipeline.

It starts the child and watches it. The child ends with it, however it ends.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import ray

from headrace.errors import HeadraceError
from headrace.exit_status import ExitStatus, ending
from headrace.ipc.schema_fingerprint import code_version

REMEDY = "a node needs the model's files at the server's path, and what its flags ask for"
ERROR = "launch_server: error: "
UNDER = ("-m", "headrace.engine_proc.placement.with_parent")
SERVER = "headrace.launch_server"
STAGE = "headrace.engine_proc.stages"
SET_BY_RAY = "OMP_NUM_THREADS"  # by the CPUs that it gives; workers know their share themselves
JOIN_S = 5.0
LOOK_S = 0.05


class NodeError(HeadraceError):
    """An engine or a stage cannot run on this node."""


class EngineActor:
    """One engine of a node."""

    def __init__(self) -> None:
        self._holder = socket.socket()
        self._last_line = ""

    def command(self, where: str, key_file: str, flags: dict[str, Any]) -> tuple[str, ...]:
        """Return the module that is the child, and its arguments."""
        config_file = memory_file("headrace-flags", msgspec.json.encode(flags))
        listen = ("--engine-listen", where, "--engine-key-file", key_file)
        return (SERVER, *listen, "--config", config_file)

    def start(self, version: str, flags: dict[str, Any], key: bytes) -> str:
        """Start the child; return where it listens, once it does.

        The key and the flags are files in memory of this process, which the child opens by path.

        Args:
            version: of the server's code.

        Raises:
            NodeError: this node has another one, or the child ends.
        """
        if version != code_version():
            raise NodeError(
                f"needs headrace {version}, and {node_address()} has {code_version()}; install the "
                "server's version there"
            )
        key_file = memory_file("headrace-key", key)
        self._holder.close()
        self._holder, where = reserve(node_address())
        self._child = subprocess.Popen(
            [sys.executable, *UNDER, str(os.getpid()), *self.command(where, key_file, flags)],
            env={name: value for name, value in os.environ.items() if name != SET_BY_RAY},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._relay = threading.Thread(target=self._relay_log, daemon=True)
        self._relay.start()
        while not self._is_taken():
            if self._child.poll() is not None:
                raise NodeError(self.wait())
            time.sleep(LOOK_S)
        return where

    def wait(self) -> str:
        """Wait for the end of the child; return how it ended."""
        code = self._child.wait()
        self._relay.join(JOIN_S)
        how = f"on {node_address()} {ending(code)}"
        if self._last_line.startswith(ERROR):
            how += f" ({self._last_line.removeprefix(ERROR)})"
        return f"{how}; {REMEDY}" if code in (ExitStatus.BAD_FLAGS, ExitStatus.BAD_MODEL) else how

    def _is_taken(self) -> bool:
        """Whether the child listens: then no other socket can have its port."""
        with new_socket(self._holder.family) as other:
            try:
                other.bind(self._holder.getsockname())
            except OSError:
                return True
        return False

    def _relay_log(self) -> None:
        """Have the child's log in that of this process, which Ray keeps on the node."""
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self._last_line = line.strip()
            sys.stderr.write(line)


class StageActor(EngineActor):
    """One stage of a pipeline on a node."""

    def command(self, where: str, key_file: str, flags: dict[str, Any]) -> tuple[str, ...]:
        """Return the module that is the child, and its arguments."""
        return (STAGE, where, key_file, str(flags["log_level"]))


def node_address() -> str:
    """Return the address of this node in the cluster."""
    return str(ray.util.get_node_ip_address())


def new_socket(family: int) -> socket.socket:
    """Return a socket that shares its port with others, as long as none of them listens."""
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def reserve(host: str) -> tuple[socket.socket, str]:
    """Return an address whose port no other process is given while a socket is open."""
    is_v6 = ":" in host
    holder = new_socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
    holder.bind((host, 0))
    port = holder.getsockname()[1]
    return holder, f"tcp://[{host}]:{port}" if is_v6 else f"tcp://{host}:{port}"


def memory_file(name: str, content: bytes) -> str:
    """Return the path of a file for processes of this user, as long as this process lives."""
    fd = os.memfd_create(name)
    os.fchmod(fd, 0o600)
    os.write(fd, content)
    return f"/proc/{os.getpid()}/fd/{fd}"
