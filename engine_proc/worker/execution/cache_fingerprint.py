"""The fingerprint of all that the bits of KV pages and states depend on, beside the tokens."""

import importlib.util
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.shm.cache_memory import FINGERPRINT_BYTES
from headrace.engine_proc.worker.execution.cache_split import CacheSplit
from headrace.native_core import best_kernels

NUMERICS = ("tp", "load_format", "dtype", "quantization", "kv_cache_dtype", "max_model_len")


def cache_fingerprint(config: ExecutionConfig, split: CacheSplit) -> bytes:
    """Return the fingerprint of pages on this machine, for as long as the server lives.

    A file of the model, or the core, that has been replaced is another one: its size or its time
    of change differs.
    """
    core = importlib.util.find_spec("headrace._core")
    assert core is not None and core.origin is not None
    paths = [Path(config.model_path), Path(core.origin)]
    if config.mmproj is not None:
        paths.append(Path(config.mmproj))
    parts = [best_kernels(), split, *(getattr(config, name) for name in NUMERICS)]
    parts += [state for path in paths for state in file_states(path)]
    return blake2b(repr(parts).encode(), digest_size=FINGERPRINT_BYTES).digest()


def file_states(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, inode, size and time of change of a file, or of each one in a folder."""
    for one in sorted(path.iterdir()) if path.is_dir() else [path]:
        state = os.stat(one)
        yield str(one), state.st_ino, state.st_size, state.st_mtime_ns
