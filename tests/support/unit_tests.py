"""The files that `make test-fast` leaves out, known without importing them.

These are system tests, adversaries, the ecosystem, GPU kernels and tests with sanitizers. So is
every file that loads torch or transformers, directly or by a module of tests/support. A single test
that starts a server, compiles or takes seconds has the marker `slow`.
"""

import functools
import re
from pathlib import Path

SUPPORT = Path(__file__).parent
FOLDERS = {"system", "adversary", "ecosystem", "real_models", "cuda"}
SLOW_IMPORTS = {
    *("torch", "transformers", "sentence_transformers", "torch_executor"),
    *("sanitized", "gpu_threads"),  # which compile
}
IMPORT = re.compile(r"^\s*(?:from|import) ([\w.]+)", re.MULTILINE)


@functools.cache
def loads_slowly(path: Path) -> bool:
    """Whether a file, or a module of tests/support that it imports, has one of `SLOW_IMPORTS`."""
    names = {part for name in IMPORT.findall(path.read_text()) for part in name.split(".")}
    support = [module for name in names if (module := SUPPORT / f"{name}.py").is_file()]
    return bool(names & SLOW_IMPORTS) or any(map(loads_slowly, support))


def is_left_out(path: Path) -> bool:
    """Whether `make test-fast` leaves a file or a folder out."""
    return path.name in FOLDERS if path.is_dir() else path.suffix == ".py" and loads_slowly(path)
