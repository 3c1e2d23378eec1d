"""Where an engine or a stage is that the placement process has placed: a file in the run directory.

The placement process writes it, the processes in the seats of engines and workers read it. The
supervisor withdraws it to have another engine placed.
"""

import os
from contextlib import suppress
from pathlib import Path

from headrace.config.process_configs import RemoteEngine


def engine_address(run_dir: str, engine: int, remote: RemoteEngine) -> str | None:
    """Return where a remote engine is, as far as that is known."""
    return remote.address or PlacedAddress(run_dir, f"engine {engine}").read()


class PlacedAddress:
    """The address of one of them, tcp://HOST:PORT.

    Args:
        name: such as "engine 1".
    """

    def __init__(self, run_dir: str, name: str) -> None:
        self._path = Path(run_dir, f"{name.replace(' ', '-')}.address")

    def read(self) -> str | None:
        """Return it; None while it is nowhere."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return None

    def write(self, where: str | None) -> None:
        """Publish it, whole or not at all; None withdraws it."""
        if where is None:
            with suppress(FileNotFoundError):
                self._path.unlink()
            return
        new = self._path.with_suffix(".new")
        new.write_text(where)
        os.replace(new, self._path)
