"""Virtual environments of their own, to measure what an install takes and brings."""

import json
import os
import subprocess
import time
from pathlib import Path

OUTSIDE = ("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV")  # of the environment this runs in
MB = 1e6


class InstallFailed(Exception):
    """pip did not install what was asked for; the text is its last line."""


class FreshInstall:
    """A virtual environment with some packages, and nothing else in its PATH: no compiler."""

    def __init__(self, folder: Path, *requirements: str, python: str, has_path: bool = False):
        """Make the environment and install.

        Args:
            requirements: arguments of `pip install`, options too.
            python: the interpreter of the environment.
            has_path: whether programs outside of the environment are found, compilers for one.

        Raises:
            InstallFailed: pip fails.
        """
        self.folder = folder
        paths = [str(folder / "bin"), *([os.environ["PATH"]] if has_path else [])]
        self.env = os.environ | dict.fromkeys(OUTSIDE, "") | {"PATH": os.pathsep.join(paths)}
        began = time.perf_counter()
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        self.megabytes_before = self.megabytes()
        pip = [str(folder / "bin/pip"), "install", "--disable-pip-version-check", "--quiet"]
        made = subprocess.run([*pip, *requirements], env=self.env, capture_output=True, text=True)
        if made.returncode != 0:
            raise InstallFailed((made.stderr.splitlines() or ["it said nothing"])[-1])
        self.seconds = time.perf_counter() - began

    def megabytes(self) -> float:
        """Return the size of all files, in units of 10^6 bytes."""
        files = (Path(root) / name for root, _, names in os.walk(self.folder) for name in names)
        return sum(file.lstat().st_size for file in files) / MB

    @property
    def num_packages(self) -> int:
        """How many packages were installed, pip and setuptools not counted."""
        pip = [str(self.folder / "bin/pip"), "list", "--disable-pip-version-check"]
        told = subprocess.run(
            [*pip, "--format", "json"], env=self.env, capture_output=True, check=True
        )
        return len({one["name"] for one in json.loads(told.stdout)} - {"pip", "setuptools"})

    def command(self, name: str) -> str:
        """Return the path of a program of the environment."""
        return str(self.folder / "bin" / name)

    def run(self, *args: str) -> str:
        """Return what a Python of the environment prints, run outside of any checkout."""
        command = [self.command("python"), *args]
        ended = subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, check=True
        )
        return ended.stdout.strip()
