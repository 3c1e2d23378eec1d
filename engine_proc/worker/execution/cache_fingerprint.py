"""The fingerprint of all that the bits of KV pages and states depend on, beside the tokens."""

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headrace import __version__
from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.shm.cache_memory import FINGERPRINT_BYTES
from headrace.engine_proc.worker.execution.cache_split import CacheSplit
from headrace.engine_proc.worker.execution.loaded_model import PAGE_TOKENS
from headrace.extras import is_installed
from headrace.model.gguf import split_paths
from headrace.native_core import best_kernels
from headrace.storage.checksum import digest_files

NUMERICS = (
    "tp",
    "pp",
    "load_format",
    "hf_overrides",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "speculative",
)
OF_IMAGES = ("numpy", "transformers", "torch")  # beside Pillow: they prepare and encode images


def cache_fingerprint(config: ExecutionConfig, split: CacheSplit, numerics: str = "") -> bytes:
    """Return the fingerprint of pages on this machine, for as long as the server lives.

    A file of the model, or the core, that has been replaced is another one: its size or its time
    of change differs.

    Args:
        numerics: of a GPU, as in `WorkerReady`; by default those of the CPU.
    """
    states = [state for path in sources(config) for state in file_states(path)]
    return fingerprint(config, numerics, split, states)


def content_digest(config: ExecutionConfig) -> bytes:
    """Return a digest of all files that pages depend on: it reads them."""
    return digest_files([path for source in sources(config) for path in files_of(source)])


def content_fingerprint(config: ExecutionConfig, content: bytes, numerics: str = "") -> str:
    """Return the fingerprint of pages on any machine, at any time.

    Args:
        content: of `content_digest`.
        numerics: as of `cache_fingerprint`.
    """
    return fingerprint(config, numerics, PAGE_TOKENS, content).hex()


def fingerprint(config: ExecutionConfig, numerics: str, *parts: object) -> bytes:
    """Return a hash of the parts, and of what else decides about bits."""
    names = [numerics or best_kernels(), *(getattr(config, name) for name in NUMERICS)]
    libraries = image_libraries() if config.image_row_size else []
    text = repr([names, libraries, parts]).encode()
    return blake2b(text, digest_size=FINGERPRINT_BYTES).digest()


def image_libraries() -> list[str]:
    """Return what makes rows of images, beside the tower's weights: others make other bits.

    Pillow's version is that of its module, since its forks are other distributions.
    """
    found = [f"headrace {__version__}"]
    if is_installed("PIL"):
        found.append(f"PIL {importlib.import_module('PIL').__version__}")
    for name in OF_IMAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


def sources(config: ExecutionConfig) -> list[Path]:
    """Return where weights and kernels are: files and folders."""
    core = importlib.util.find_spec("headrace._core")
    assert core is not None and core.origin is not None
    paths = [Path(config.model_path), Path(core.origin)]
    others = (config.mmproj, config.draft_model)
    return [*paths, *(Path(path) for path in others if path is not None)]


def files_of(path: Path) -> list[Path]:
    """Return a file and what it is split into, or the files in a folder by name."""
    if path.is_dir():
        return [one for one in sorted(path.iterdir()) if one.is_file()]
    return split_paths(path)


def file_states(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, inode, size and time of change of a file, or of each one in a folder."""
    for one in files_of(path):
        state = os.stat(one)
        yield str(one), state.st_ino, state.st_size, state.st_mtime_ns
