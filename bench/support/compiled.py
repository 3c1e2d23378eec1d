"""C files of benchmarks, compiled where they run, so that no instruction set is too new."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path

from support.models import CACHE

FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")


@cache
def compiled(name: str) -> ctypes.CDLL:
    """Return the library that a C file of this folder becomes."""
    CACHE.mkdir(parents=True, exist_ok=True)
    library = CACHE / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run(["cc", *FLAGS, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))
