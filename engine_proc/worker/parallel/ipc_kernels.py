"""The kernels of `csrc/collectives/all_reduce.cuh`: compiled by NVRTC, kept on disk, launched.

To compile takes half a second and neither a GPU nor a driver. What comes out is machine code of one
architecture: unlike PTX it does not depend on the driver to know the compiler's version.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.engine_proc.worker.parallel.gpu_protocols import Argument
from headrace.engine_proc.worker.parallel.ipc_memory import CudaError
from headrace.system.all_reduce_policy import DTYPES

SOURCES = ("collectives/ptx.cuh", "collectives/all_reduce.cuh")  # one program, in this order
NAMES = (
    "gather_bytes",
    *(f"{kernel}_{dtype}" for kernel in ("one_shot", "two_shot", "fused") for dtype in DTYPES),
)
GROUP_NAME = b"own_group"  # in constant memory: each loaded module has its own
LEGACY_STREAM = 1  # CU_STREAM_LEGACY: what 0 means, too
NUM_THREADS = 512  # of a block, as the kernels are compiled for
MAX_BLOCKS = 36  # more bring nothing over NVLink (vLLM's)


def source() -> str:
    """Return the program."""
    folder = Path(__file__).resolve().parent
    root = next(p for p in folder.parents if (p / "csrc" / SOURCES[0]).is_file())
    return "".join((root / "csrc" / name).read_text() for name in SOURCES)


def compile_cubin(arch: str, world: int, macros: Sequence[tuple[str, str]] = ()) -> bytes:
    """Compile for an architecture such as "sm_90".

    Args:
        macros: further ones, for tests.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        std="c++17",
        arch=arch,
        fma=False,  # sums of products have the same bits wherever they are computed
        define_macro=[("HEADRACE_WORLD", str(world)), *macros],
    )
    code = Program(source(), "c++", options).compile("cubin").code
    assert isinstance(code, bytes)
    return code


def compiler_version() -> str:
    """Return which NVRTC compiles, wherever it comes from: pip, conda or the system."""
    from cuda.bindings import nvrtc

    code, major, minor = nvrtc.nvrtcVersion()
    assert code == 0, code
    return f"{major}.{minor}"


def cache_folder() -> Path:
    """Return where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace"


def cubin(arch: str, world: int, folder: Path) -> bytes:
    """Return the kernels, compiled unless `folder` has them for this source and compiler."""
    parts = (source(), arch, str(world), compiler_version())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = folder / f"all_reduce-{arch}-{world}-{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = compile_cubin(arch, world)
    keep(path, code)
    return code


def keep(path: Path, code: bytes) -> None:
    """Write a file whole or not at all: several workers may do it at once, or have no home."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(code)
        draft.replace(path)
    except OSError:
        return


class CudaKernels:
    """Kernels on the current GPU: a `Kernels`.

    Args:
        code: of this GPU's architecture.
    """

    num_threads = NUM_THREADS

    def __init__(self, code: bytes, max_blocks: int = MAX_BLOCKS) -> None:
        from cuda.bindings.driver import cuLibraryGetGlobal
        from cuda.core import LaunchConfig, ObjectCode, Stream, launch

        self.max_blocks = max_blocks
        module = ObjectCode.from_cubin(code)
        status, address, _ = cuLibraryGetGlobal(module.handle, GROUP_NAME)
        if status != 0:
            raise CudaError(f"cuLibraryGetGlobal: {status.name}")
        self.group_address = int(address)
        self._kernels = {name: module.get_kernel(name) for name in NAMES}
        self._streams: dict[int, Any] = {}
        self._stream = Stream.from_handle
        self._config, self._launch = LaunchConfig, launch

    def launch(
        self, name: str, num_blocks: int, stream: int, arguments: Sequence[Argument]
    ) -> None:
        """Launch a kernel by name."""
        if stream not in self._streams:
            self._streams[stream] = self._stream(stream or LEGACY_STREAM)
        config = self._config(grid=num_blocks, block=self.num_threads)
        self._launch(self._streams[stream], config, self._kernels[name], *arguments)
