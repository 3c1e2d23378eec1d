"""Hardware and packages of this machine. `root` replaces / in tests."""

import math
import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.native_core import best_kernels
from headrace.system.cgroups import cpu_quota, memory_limits, read
from headrace.system.processor_name import processor_name

KB = 1 << 10
NUMBER_BYTES = 7  # of a word of the board
NVIDIA = Path("/dev/nvidiactl")  # is there where the driver of NVIDIA's GPUs is
NAME = re.compile(r"[\w.-]+")
VISIBLE = "CUDA_VISIBLE_DEVICES"  # of CUDA: the GPUs that programs may see
TILES = {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512vbmi"}  # to use them


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Cores, memory, devices and limits."""

    processor: str
    isa: str  # of the kernels that run, see `best_kernels`; "none" if the core is missing
    is_refused_tiles: bool  # which the processor has: the system keeps them from this process
    num_cores: int
    num_usable: int  # that this process may run on,
    quota: float  # and how many cores' time its container may use; inf is no limit
    memory_bytes: int
    free_bytes: int  # for new things, of the container's share if it has one
    num_numa_nodes: int
    gpus: list[str]  # unless all are hidden
    driver: str | None
    shm_bytes: int | None  # of /dev/shm; None is that there is none
    max_files: int  # open at once; -1 is no limit

    @classmethod
    def look(cls, root: Path = Path("/"), find: Callable[[], str] = best_kernels) -> "Machine":
        """Inspect this machine; `find` returns the kernels that run on it."""
        info = read(root / "proc/cpuinfo")
        flags = set(field(info, "flags").split())
        memory = read(root / "proc/meminfo")
        free = kilobytes(memory, "MemAvailable")
        driver = re.search(r"Kernel Module\s+(?:\S+\s+)*?([\d.]+)", nvidia(root, "version"))
        gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
        nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
        shm = root / "dev/shm"
        isa = isa_of(find)
        return cls(
            processor=processor_name(info),
            isa=isa,
            is_refused_tiles=isa == "avx512" and flags >= TILES,
            num_cores=os.cpu_count() or 1,
            num_usable=len(os.sched_getaffinity(0)),
            quota=cpu_quota(root),
            memory_bytes=kilobytes(memory, "MemTotal"),
            free_bytes=min([free, *container_bytes(root)]),
            num_numa_nodes=max(len(nodes), 1),
            gpus=[] if are_gpus_hidden() else [field(read(path), "Model") for path in gpus],
            driver=driver and driver[1],
            shm_bytes=free_space(shm) if shm.is_dir() else None,
            max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        )


def has_gpus() -> bool:
    """Whether there may be GPUs; whether they can run a model, workers find out."""
    return NVIDIA.exists() and not are_gpus_hidden()


def are_gpus_hidden() -> bool:
    """Whether the environment hides all GPUs from this process."""
    return os.environ.get(VISIBLE) in ("", "-1")


def nvidia(root: Path, name: str) -> str:
    """Return the NVIDIA driver's report, if there is a driver."""
    return read(root / "proc/driver/nvidia" / name)


def field(text: str, name: str) -> str:
    """Return the first value of `name : value` lines; "" where there is none."""
    found = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def kilobytes(text: str, name: str) -> int:
    """Return a line of /proc/meminfo in bytes."""
    value = field(text, name).split()
    return int(value[0]) * KB if value else 0


def isa_of(find: Callable[[], str]) -> str:
    """Return which kernels run; none where they are missing, which is found out elsewhere, too."""
    try:
        return find()
    except HeadraceError:
        return "none"


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many threads get a core: those of the affinity, or of the container's quota.

    A part of a core counts as one.
    """
    num_cores = len(os.sched_getaffinity(0))
    return max(1, min(num_cores, math.ceil(min(cpu_quota(root), num_cores))))


def container_bytes(root: Path) -> Iterator[int]:
    """Yield how much more memory a container may have, if that is limited."""
    for limit, used in memory_limits(root):
        yield max(limit - used, 0)


def memory_limit(root: Path = Path("/")) -> int:
    """Return how many bytes of memory there are, in the container if that is less."""
    total = kilobytes(read(root / "proc/meminfo"), "MemTotal")
    return min([total, *(limit for limit, _ in memory_limits(root))])


def kernels_number(gpus: Sequence[str]) -> int:
    """Return a number of what computes: kernels of a CPU, or kinds of GPUs.

    Args:
        gpus: the names of the kinds; none where a CPU computes.
    """
    name = ", ".join(gpus) or best_kernels()
    return int.from_bytes(blake2b(name.encode(), digest_size=NUMBER_BYTES).digest())


def free_space(folder: Path) -> int:
    """Return how many bytes a file system has room for."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def packages() -> dict[str, str | None]:
    """Return the version of every package that Headrace needs; None is that it is not there."""
    import importlib.metadata  # not for each process of the ring: it takes 2 MB and 20 ms

    found: dict[str, str | None] = {}
    for requirement in importlib.metadata.requires("headrace") or []:
        if "extra ==" in requirement:
            continue
        name = NAME.match(requirement)
        assert name is not None
        try:
            found[name[0]] = importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            found[name[0]] = None
    return found
