"""Where an engine is that the placement process has placed: a file in the run directory.

The placement process writes it, the process in the engine's seat reads it.
"""

import os
from contextlib import suppress
from pathlib import Path


class EngineAddress:
    """The address of one engine, tcp://HOST:PORT."""

    def __init__(self, run_dir: str, engine: int) -> None:
        self._path = Path(run_dir, f"engine-{engine}.address")

    def read(self) -> str | None:
        """Return it; None while the engine is nowhere."""
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
