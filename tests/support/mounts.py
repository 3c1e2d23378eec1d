"""File systems of a test's own."""

import shutil
import subprocess

import pytest


def may_mount() -> bool:
    """Whether a process may have file systems of its own."""
    command = ["unshare", "--mount", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command).returncode == 0


has_mounts = pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
