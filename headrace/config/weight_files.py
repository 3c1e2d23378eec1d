"""The files of a model's weights: how large they are, and whether two machines have the same."""

import os
from hashlib import blake2b
from pathlib import Path

from headrace.model.gguf import split_paths

WEIGHTS = ("*.safetensors", "*.gguf")
CONFIG = "config.json"  # of a folder
NUM_PIECES = 1024  # of all files together
PIECE_BYTES = 4096
DIGEST_BYTES = 8


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model's weights that are there."""
    if path.is_file():
        return [part for part in split_paths(path) if part.exists()]
    return [file for pattern in WEIGHTS for file in sorted(path.glob(pattern))]


def weight_bytes(path: Path) -> int:
    """Return how large a model's weights are as they are stored."""
    return sum(file.stat().st_size for file in weight_files(path))


def sampled_digest(path: Path) -> str:
    """Return a digest of a model's config, and of sizes and evenly spread pieces of its weights.

    It reads 4 MiB, and tells fine-tunes of one base apart. What differs in less than a thousandth
    of all bytes may look alike.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    files = weight_files(path)
    interval = max(sum(file.stat().st_size for file in files) // NUM_PIECES, PIECE_BYTES)
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            for start in range(0, size, interval):
                digest.update(os.pread(opened.fileno(), PIECE_BYTES, start))
    config = path / CONFIG
    if config.is_file():
        digest.update(config.read_bytes())
    return digest.hexdigest()
