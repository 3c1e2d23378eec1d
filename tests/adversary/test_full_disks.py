"""A disk that becomes full while a server runs: it serves on, and processes are still replaced."""

import asyncio
import contextlib
import errno
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from attack_rounds import attack_rounds
from mounts import has_mounts
from servers import PATIENCE_S, RunningServer, wait_until
from stream_reader import difference, read_all

SIZE, NUM_FILES = "8m", 64  # of the disk
PIECE = bytes(4096)
KILLED = ("tokenizer 0", "detokenizer 0", "engine", "worker 0", "frontend 0")
FLAGS = ("--kv-cache-dtype", "float32", "--max-num-seqs", "8")


@dataclass(frozen=True)
class Disk:
    """A small file system for a server's run directory, crash reports and record."""

    folder: Path

    def serve(self, model: Path) -> RunningServer:
        """Start a server that has it, and no other process has."""
        mount = f"mount -t tmpfs -o size={SIZE},nr_inodes={NUM_FILES} none {self.folder}"
        return RunningServer(
            *(str(model), *FLAGS, "--record", f"{self.folder}/record"),
            *("--crash-dir", f"{self.folder}/crashes"),
            env={"TMPDIR": str(self.folder)},
            under=("unshare", "--mount", "bash", "-ec", f'{mount}; exec "$@"', "bash"),
        )

    def fill(self, server: RunningServer) -> None:
        """Leave room for no byte and no file."""
        inside = Path(f"/proc/{server.process.pid}/root{self.folder}")
        for number in range(NUM_FILES):
            try:
                with (inside / f"full-{number}").open("wb", buffering=0) as file:
                    while file.write(PIECE):
                        pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


@pytest.fixture
def filled_server(tiny_folder: Path, socket_folder: Path) -> Iterator[tuple[RunningServer, Disk]]:
    disk = Disk(socket_folder)
    running = disk.serve(tiny_folder)
    yield running, disk
    assert running.stop() == 0
    assert "Traceback" not in running.log


def answers(server: RunningServer) -> list[Any]:
    return asyncio.run(read_all(server.url))


def is_well(server: RunningServer) -> bool:
    with contextlib.suppress(httpx.TransportError):  # no frontend listens
        return httpx.get(f"{server.url}/health").status_code == 200
    return False


@has_mounts
def test_full_disk_changes_no_text(filled_server: tuple[RunningServer, Disk]) -> None:
    server, disk = filled_server
    expected = answers(server)
    for rng in attack_rounds("full disks", 0.1):
        disk.fill(server)
        name = rng.choice(KILLED)
        print(f"kill {name}")
        assert not difference(answers(server), expected)
        process = server.ring[f"headrace: {name}"]
        process.kill()
        process.wait(PATIENCE_S)
        wait_until(lambda: is_well(server), "good health again")


def test_limit_on_files_changes_no_text(tiny_folder: Path, tmp_path: Path) -> None:
    """The stand-in for a full disk where there is no right to mount one."""
    server = RunningServer(str(tiny_folder), *FLAGS, "--record", str(tmp_path / "record"))
    try:
        expected = answers(server)
        for title, process in server.processes.items():
            if title != "headrace: supervisor":  # its children would inherit the limit
                process.rlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        assert not difference(answers(server), expected)
        assert server.stop() == 0
    finally:
        server.close()
    assert "the disk is full" in server.log
    assert "Traceback" not in server.log
