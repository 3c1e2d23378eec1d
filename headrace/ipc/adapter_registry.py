"""The adapters (LoRA) of a server by name: files in the run directory that all processes share.

A name is that of an adapter added by a flag or a request, or else of one in `--lora-dir`. Nothing
of an adapter is read here but where its files are: workers read them.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from urllib.parse import quote

import msgspec

from headrace.errors import BAD_JSON, InvalidValue
from headrace.ipc.messages import AdapterSource
from headrace.ipc.published_page import PublishedPage

DIGEST_BYTES = 16
MAX_NAME = 80  # characters; quoted, they fit the name of a file
USAGE = "lora_usage-"  # a page of each replica
FILES = ("adapter_config.json", "adapter_model.safetensors")


class AdapterUsage(msgspec.Struct):
    """Which adapters have sequences in the engine, by name."""

    max_loras: int
    running: list[str]
    waiting: list[str]  # with no sequence that runs there
    at: float  # seconds since the epoch


class AdapterRegistry:
    """The adapters of one server. Each call looks at the files anew.

    Args:
        lora_dir: a folder of adapters that are found by name; None: there is none.
        replica: the engine that reports what it uses.
    """

    def __init__(self, run_dir: str, lora_dir: str | None, replica: int = 0) -> None:
        self._folder = Path(run_dir) / "adapters"
        self._lora_dir = None if lora_dir is None else Path(lora_dir)
        self._run_dir = run_dir
        self._usage = PublishedPage(run_dir, f"{USAGE}{replica}")

    def find(self, name: str) -> AdapterSource | None:
        """Return an adapter, if there is one of that name."""
        if not is_name(name):
            return None
        with contextlib.suppress(OSError, *BAD_JSON):
            return msgspec.msgpack.decode(self._file(name).read_bytes(), type=AdapterSource)
        if self._lora_dir is None or not is_inside(name):
            return None
        path = self._lora_dir / name
        with contextlib.suppress(OSError):
            if path.resolve().is_relative_to(self._lora_dir.resolve()):
                return AdapterSource(name, str(path), digest_of(path))
        return None

    def add(self, name: str, path: str) -> AdapterSource:
        """Add an adapter, in place of one of the same name.

        Raises:
            InvalidValue: it cannot have that name, or is not at that path.
        """
        if not is_name(name):
            raise InvalidValue(
                f"lora_name: must have 1 to {MAX_NAME} characters, not {len(name)}", "lora_name"
            )
        if ".." in Path(path).parts:
            raise InvalidValue(f"lora_path: {path!r} must not have '..' in it", "lora_path")
        found = Path(path)
        if self._lora_dir is not None and not found.is_absolute():
            found = self._lora_dir / found
        try:
            source = AdapterSource(name, str(found.absolute()), digest_of(found))
        except (OSError, ValueError) as error:
            raise InvalidValue(
                f"lora_path: {path!r} is no adapter, a folder with {FILES[0]} or a .gguf file: "
                f"{error}",
                "lora_path",
            ) from None
        self._folder.mkdir(exist_ok=True)
        new = self._folder / f"{os.getpid()}.new"
        new.write_bytes(msgspec.msgpack.encode(source))
        new.rename(self._file(name))
        return source

    def remove(self, name: str) -> bool:
        """Remove an adapter that was added; return whether there was one."""
        try:
            self._file(name).unlink()
        except OSError:
            return False
        return True

    def discard(self, source: AdapterSource) -> None:
        """Remove an adapter that proves to be broken, unless another has its name."""
        if self.find(source.name) == source:
            self.remove(source.name)

    def __iter__(self) -> Iterator[AdapterSource]:
        """Yield the adapters that were added, by name; not those of `--lora-dir`."""
        for file in sorted(self._folder.glob("=*")):
            with contextlib.suppress(OSError, *BAD_JSON):
                yield msgspec.msgpack.decode(file.read_bytes(), type=AdapterSource)

    def report(self, usage: AdapterUsage) -> None:
        """Publish which adapters are in use."""
        self._usage.write(msgspec.msgpack.encode(usage))

    @property
    def usage(self) -> AdapterUsage | None:
        """Which adapters the engines have used lately; None where they have used none.

        One that waits in an engine may run in another.
        """
        names = (path.name for path in Path(self._run_dir).glob(f"{USAGE}*") if not path.suffix)
        pages = (PublishedPage(self._run_dir, name).read(math.inf) for name in names)
        usages = [
            msgspec.msgpack.decode(page.body, type=AdapterUsage)
            for page in pages
            if page is not None
        ]
        if not usages:
            return None
        return AdapterUsage(
            usages[0].max_loras,
            sorted({name for usage in usages for name in usage.running}),
            sorted({name for usage in usages for name in usage.waiting}),
            max(usage.at for usage in usages),
        )

    def _file(self, name: str) -> Path:
        return self._folder / f"={quote(name, safe='')}"


def is_name(name: str) -> bool:
    """Whether an adapter may be called so."""
    return 0 < len(name) <= MAX_NAME and len(quote(name, safe="")) < 240


def is_inside(name: str) -> bool:
    """Whether a name is that of an entry of a folder, and not of the folder or what is around."""
    return "/" not in name and "\0" not in name and name not in (".", "..")


def digest_of(path: Path) -> bytes:
    """Return what names an adapter's files as they are: it changes when they are replaced.

    Raises:
        OSError: they are not there.
    """
    files = [path] if path.suffix == ".gguf" else [path / FILES[0]]
    weights = path / FILES[1]
    if path.suffix != ".gguf" and weights.exists():
        files.append(weights)
    seen = [(str(file.absolute()), *identity(file)) for file in files]
    return blake2b(repr(seen).encode(), digest_size=DIGEST_BYTES).digest()


def identity(file: Path) -> tuple[int, ...]:
    """Return the numbers by which the system tells a file's contents from earlier ones."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
