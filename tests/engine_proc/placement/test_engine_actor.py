"""The process of Ray's on a node: how it starts its child, and tells of its end."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from ray_modules import beside_double
from servers import wait_until

from headrace.ipc.schema_fingerprint import code_version

KEY = b"0123456789" * 4
WITH_PARENT = "headrace.engine_proc.placement.with_parent"
ORPHAN = f"""
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
command = [sys.executable, "-m", "{WITH_PARENT}", str(os.getpid()), "http.server", "0"]
child = subprocess.Popen([*command, "--bind", "127.0.0.1"], stdout=subprocess.PIPE)
child.stdout.readline()  # it serves
print(child.pid)
"""


@pytest.fixture
def module() -> Iterator[ModuleType]:
    with beside_double("engine_actor") as found:
        yield found


@contextmanager
def actor(module: ModuleType, *command: str) -> Iterator[Any]:
    """An actor whose child is another module; PORT is where it is to listen."""

    class Actor(module.EngineActor):  # type: ignore[misc, name-defined]
        def command(self, where: str, _key_file: str, _flags: Any) -> tuple[str, ...]:
            port = str(urlsplit(where).port)
            return tuple(port if word == "PORT" else word for word in command)

    made = Actor()
    yield made
    made._holder.close()
    if hasattr(made, "_child"):
        made._child.stderr.close()


def test_an_actor_tells_where_its_child_listens_and_how_it_ends(module: ModuleType) -> None:
    with actor(module, "http.server", "PORT", "--bind", "127.0.0.1") as own:
        where = urlsplit(own.start(code_version(), {}, KEY))
        socket.create_connection((where.hostname, where.port or 0)).close()
        own._child.kill()
        assert own.wait() == "on 127.0.0.1 was killed by SIGKILL"


def test_threads_of_a_child_are_not_those_that_ray_counts(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with actor(module, "http.server", "PORT", "--bind", "127.0.0.1") as own:
        own.start(code_version(), {}, KEY)
        found = psutil.Process(own._child.pid).environ()
        own._child.kill()
        own.wait()
    assert "OMP_NUM_THREADS" not in found
    assert found["OMP_WAIT_POLICY"] == "passive"


def test_a_child_that_ends_before_it_listens_fails_the_start(module: ModuleType) -> None:
    with (
        actor(module, "http.server", "--none") as own,
        pytest.raises(module.NodeError, match=r"^on 127.0.0.1 exited with 2; a node needs"),
    ):
        own.start(code_version(), {}, KEY)


def test_an_actor_of_another_version_starts_nothing(module: ModuleType) -> None:
    with (
        actor(module, "http.server", "PORT") as own,
        pytest.raises(module.NodeError, match=r"needs headrace other, and 127.0.0.1 has"),
    ):
        own.start("other", {}, KEY)


def test_key_and_flags_are_files_of_this_user_alone(module: ModuleType) -> None:
    path = module.memory_file("name", KEY)
    with open(path, "rb") as file:
        assert file.read() == KEY
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    os.close(int(path.rpartition("/")[2]))


def test_a_reserved_port_goes_to_one_that_shares_it(module: ModuleType) -> None:
    holder, where = module.reserve("127.0.0.1")
    with holder, module.new_socket(holder.family) as child:
        child.bind(("127.0.0.1", urlsplit(where).port))
        child.listen()


def test_a_child_ends_with_a_parent_that_blocks_signals() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True)
    pid = int(done.stdout)
    wait_until(lambda: not psutil.pid_exists(pid) or is_zombie(pid), "the child has ended")


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and is not reaped yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
