"""The pages in `frontend/ui/dist` are built from the sources beside them."""

import gzip
import hashlib
from pathlib import Path

UI = Path(__file__).parents[2] / "frontend" / "ui"
DIST = UI / "dist"
SOURCES = ("build.mjs", "package-lock.json", "package.json", "tsconfig.json")  # beside src/
MAX_BYTES = 150_000  # of all that the page at / may load, compressed


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_dist_is_built_from_these_sources() -> None:
    below = [path.relative_to(UI).as_posix() for path in (UI / "src").rglob("*") if path.is_file()]
    lines = [f"{digest((UI / name).read_bytes())}  {name}\n" for name in sorted([*SOURCES, *below])]
    built = (DIST / "sources.sha256").read_text().strip()
    assert built == digest("".join(lines).encode()), "make ui"


def test_compressed_files_hold_what_they_stand_for() -> None:
    compressed = list(DIST.rglob("*.gz"))
    assert compressed
    for path in compressed:
        assert gzip.decompress(path.read_bytes()) == path.with_suffix("").read_bytes(), path
        assert path.with_suffix(".br").is_file()


def test_page_is_small() -> None:
    files = [
        DIST / "index.html",
        *(p for p in (DIST / "ui").iterdir() if p.suffix in (".js", ".css")),
    ]
    smallest = [min(p, p.with_name(p.name + ".gz"), key=size) for p in files]
    assert sum(map(size, smallest)) < MAX_BYTES


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else MAX_BYTES
