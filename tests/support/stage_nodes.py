"""Stages of other machines, as processes of this one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import zmq
from opened import OPENED
from servers import kill_tree, wait_until

from headrace.config.process_configs import RemoteStages
from headrace.config.weight_files import sampled_digest
from headrace.ipc.schema_fingerprint import code_version
from headrace.runtime.placed_address import PlacedAddress
from support.ports import reserved_port

LISTENS = re.compile(r"a stage may come to (\S+)\n")
MAX_LOG_BYTES = 1 << 20


class RunningStage:
    """A process that waits for a stage, or has one. Another may follow it.

    Attributes:
        where: it listens.
    """

    def __init__(self, key_file: Path) -> None:
        self._key_file = key_file
        self._log: int | None = None  # a descriptor
        OPENED.close_with_owner(self.close)
        self.start()

    def start(self) -> None:
        """Start it at a free port, and wait until it listens."""
        with reserved_port() as port:
            where = f"tcp://127.0.0.1:{port}"
            command = (sys.executable, "-m", "headrace.engine_proc.stages")
            self._log = os.memfd_create("log")  # a pipe would have to be read
            self.process = subprocess.Popen(
                [*command, where, str(self._key_file), "info"], stderr=self._log
            )
            wait_until(self._listens_or_has_ended, "the stage listens")
        match = LISTENS.search(self.log)
        assert match is not None, self.log
        self.where = match[1]

    @property
    def log(self) -> str:
        """All that it has logged."""
        assert self._log is not None
        return os.pread(self._log, MAX_LOG_BYTES, 0).decode()

    def _listens_or_has_ended(self) -> bool:
        return LISTENS.search(self.log) is not None or self.process.poll() is not None

    def close(self) -> None:
        """End it and all that it has started, by SIGKILL."""
        if self._log is not None:
            kill_tree(self.process)
            os.close(self._log)
            self._log = None


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
