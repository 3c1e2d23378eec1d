"""Stages of other machines, as processes of this one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import zmq
from opened import OPENED
from readable import readable
from servers import PATIENCE_S, kill_tree

from headrace.config.process_configs import RemoteStages
from headrace.config.weight_files import sampled_digest
from headrace.ipc.schema_fingerprint import code_version
from headrace.runtime.placed_address import PlacedAddress
from support.ports import reserved_port

LISTENS = re.compile(r"a stage may come to (\S+)")


class RunningStage:
    """A process that waits for a stage, or has one. Another may follow it.

    Attributes:
        where: it listens.
    """

    def __init__(self, key_file: Path) -> None:
        self._key_file = key_file
        OPENED.close_with_owner(self.close)
        self.start()

    def start(self) -> None:
        """Start it at a free port, and wait until it listens."""
        with reserved_port() as port:
            where = f"tcp://127.0.0.1:{port}"
            command = (sys.executable, "-m", "headrace.engine_proc.stages")
            self.process = subprocess.Popen(
                [*command, where, str(self._key_file), "info"], stderr=subprocess.PIPE
            )
        self.log = ""
        while (match := LISTENS.search(self.log)) is None:
            self.read_log()
        self.where = match[1]

    def read_log(self) -> None:
        """Wait for more of its log."""
        assert self.process.stderr is not None
        assert readable([self.process.stderr], PATIENCE_S), self.log
        data = os.read(self.process.stderr.fileno(), 65536)
        assert data, self.log
        self.log += data.decode()

    def close(self) -> None:
        """End it and all that it has started, by SIGKILL."""
        assert self.process.stderr is not None
        if not self.process.stderr.closed:
            kill_tree(self.process)


def new_key(path: Path) -> Path:
    """Write a new key, and return its path."""
    path.write_bytes(zmq.curve_keypair()[1])
    path.chmod(0o600)
    return path


def remote_stages(run_dir: Path, key_file: Path, model: str) -> RemoteStages:
    """Return what an engine knows of stages on other machines."""
    terms = {"version": code_version(), "digest of weights": sampled_digest(Path(model))}
    return RemoteStages(
        run_dir=str(run_dir), key_file=str(key_file), watchdog_timeout=8, terms=terms
    )


def place(run_dir: Path, *stages: RunningStage) -> None:
    """Tell where the stages after the first are."""
    for number, stage in enumerate(stages, 1):
        PlacedAddress(str(run_dir), f"stage {number}").write(stage.where)
