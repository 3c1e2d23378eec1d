"""The kernels are built for every GPU, and CPU threads in place of a GPU's keep to the protocol."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_tests import RUNS_ALL, first_of, rarely
from gpu_threads import DEADLINE_S, build

from headrace.engine_proc.worker.parallel import ipc_kernels
from headrace.engine_proc.worker.parallel.ipc_kernels import NAMES, SOURCES
from headrace.engine_proc.worker.parallel.ipc_memory import CudaError
from headrace.system.all_reduce_policy import WORLDS

ARCHITECTURES = ["sm_90", "sm_80", "sm_89", "sm_86", "sm_100", "sm_120"]
GPU_ARCHITECTURES = ["80", "89", "90", "100"]  # what `make gpu-static` compiles for
ROOT = Path(__file__).parents[4]
CSRC = ROOT / "csrc"
TABLE = ROOT / "bench" / "results" / "cuda_static.json"
RELEASE, DOUBLE_BUFFER, EXIT = 1, 2, 4  # Part, of csrc/collectives/all_reduce.cuh
RACE = 66  # how a program ends in which ThreadSanitizer has seen one


def test_the_kernels_include_nothing() -> None:
    assert "#include" not in ipc_kernels.source()


@pytest.mark.parametrize("arch", first_of(1, ARCHITECTURES))
def test_kernels_are_built_by_nvrtc(arch: str) -> None:
    pytest.importorskip("cuda.core", reason="cuda-python is not installed")
    pytest.importorskip("nvidia.cu13", reason="nvidia-cuda-nvrtc is not installed")
    world = WORLDS[ARCHITECTURES.index(arch) % len(WORLDS)]
    code = ipc_kernels.compile_cubin(arch, world)
    assert code.startswith(b"\x7fELF")
    for name in (*NAMES, ipc_kernels.GROUP_NAME.decode()):
        assert f"{name}\0".encode() in code
    rows = json.loads(TABLE.read_text()).get(f"NVRTC {ipc_kernels.compiler_version()}", {})
    number = arch.removeprefix("sm_")
    if rows and number in GPU_ARCHITECTURES:
        kernel_compiler = pytest.importorskip("kernel_compiler", reason="triton is not installed")
        found = {name: list(usage) for name, usage in kernel_compiler.usages(code).items()}
        assert found == {name: rows[f"{name} WORLD={world}"][number] for name in NAMES}


def test_loads_are_under_way_before_one_is_waited_for() -> None:
    """What an H100 runs, in its order: what each saves in time, no test without a GPU can say."""
    pytest.importorskip("cuda.core", reason="cuda-python is not installed")
    pytest.importorskip("nvidia.cu13", reason="nvidia-cuda-nvrtc is not installed")
    kernel_compiler = pytest.importorskip("kernel_compiler", reason="triton is not installed")
    world = 8
    code = ipc_kernels.compile_cubin("sm_90", world)
    one_shot, two_shot, gather = (
        kernel_compiler.memory_instructions(code, name)
        for name in ("one_shot_bfloat16", "two_shot_bfloat16", "gather_bytes")
    )
    for kernel in (one_shot, two_shot, gather):
        flag, met = kernel.index("ST.E.64.STRONG.SYS"), kernel.index("BAR.RED.AND.DEFER_BLOCKING")
        loads = [name for name in kernel[:flag] if name.startswith(("LD.", "LDG."))]
        # The call's number, whether it has failed, and a vector: addresses are in constant memory.
        assert loads == ["LDG.E", "LD.E.STRONG.SYS", "LDG.E.128"]
        assert (
            kernel.index("ATOM.E.ADD.STRONG.GPU") > met
        )  # a call is counted while the block goes on
        # All ranks' vectors are asked for before the first is stored: of two-shot twice.
        vectors = [name[:2] for name in kernel if name.endswith("E.128")][2:]  # but the own copy
        first = vectors.index("ST")
        assert vectors[:first] == ["LD"] * world
    assert [name[:2] for name in two_shot if name.endswith("E.128")][-2 * world :] == [
        *["LD"] * world,
        *["ST"] * world,
    ]


@rarely
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_kernels_are_built_by_nvcc(tmp_path: Path) -> None:
    first, second = (str(CSRC / name) for name in SOURCES)
    out = tmp_path / "kernels.cubin"
    command = ["nvcc", "-x", "cu", "-std=c++17", "--fmad=false", "-Werror", "all-warnings"]
    command += ["-arch=sm_90", "-DHEADRACE_WORLD=8", "-include", first, "-cubin", "-o", str(out)]
    subprocess.run([*command, second], check=True)
    assert out.stat().st_size


def test_compiled_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, int]] = []

    def compile_cubin(arch: str, world: int) -> bytes:
        compiled.append((arch, world))
        return f"{arch} {world}".encode()

    monkeypatch.setattr(ipc_kernels, "compile_cubin", compile_cubin)
    monkeypatch.setattr(ipc_kernels, "compiler_version", lambda: "1")
    folder = tmp_path / "cache"
    for _ in range(2):
        assert ipc_kernels.cubin("sm_90", 2, folder) == b"sm_90 2"
        assert ipc_kernels.cubin("sm_90", 4, folder) == b"sm_90 4"
    assert compiled == [("sm_90", 2), ("sm_90", 4)]
    monkeypatch.setattr(ipc_kernels, "source", lambda: "another")
    ipc_kernels.cubin("sm_90", 2, folder)
    monkeypatch.setattr(ipc_kernels, "compiler_version", lambda: "2")
    ipc_kernels.cubin("sm_90", 2, folder)
    assert compiled[2:] == [("sm_90", 2)] * 2
    assert len(os.listdir(folder)) == 4


def test_the_compiler_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not pip: NVRTC may be conda's or the system's."""
    nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 9))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(nvrtc=nvrtc))
    assert ipc_kernels.compiler_version() == "13.9"


def test_kernels_run_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_kernels, "compile_cubin", lambda *_: b"code")
    monkeypatch.setattr(ipc_kernels, "compiler_version", lambda: "1")
    (tmp_path / "file").touch()
    assert ipc_kernels.cubin("sm_90", 2, tmp_path / "file" / "folder") == b"code"


def test_numbers_have_32_bits_in_a_launch_and_addresses_64() -> None:
    """A plain int in place of a number would shift whatever comes after it."""
    module = pytest.importorskip("cuda.core.cu13._kernel_arg_handler", reason="no cuda-python")
    arguments = [1 << 40, np.uint32(0xFFFFFFFF), np.float32(1.0)]
    holder = module.ParamHolder(arguments)
    addresses = (ctypes.c_void_p * 3).from_address(holder.ptr)
    assert ctypes.c_uint64.from_address(addresses[0]).value == 1 << 40
    assert ctypes.c_uint32.from_address(addresses[1]).value == 0xFFFFFFFF
    assert ctypes.c_float.from_address(addresses[2]).value == 1.0


def test_kernels_are_launched_by_name_on_the_given_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in for cuda.core: no kernel was ever launched through the real one."""
    launched: list[tuple[object, ...]] = []
    code = SimpleNamespace(get_kernel=lambda name: f"kernel {name}", handle="library")
    core = SimpleNamespace(
        ObjectCode=SimpleNamespace(from_cubin=lambda cubin: code),
        Stream=SimpleNamespace(from_handle=lambda handle: f"stream {handle}"),
        LaunchConfig=lambda grid, block: (grid, block),
        launch=lambda *given: launched.append(given),
    )
    found = {("library", b"own_group"): (0, 4096, 240)}
    driver = SimpleNamespace(cuLibraryGetGlobal=lambda *given: found[given])
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    kernels = ipc_kernels.CudaKernels(b"code")
    assert kernels.group_address == 4096
    for stream in (7, 0):
        kernels.launch("two_shot_float16", 3, stream, (1, np.uint32(2)))
    launch = ((3, 512), "kernel two_shot_float16", 1, np.uint32(2))
    assert launched == [("stream 7", *launch), ("stream 1", *launch)]


def test_a_module_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code = SimpleNamespace(handle="library")
    of_name = dict.fromkeys(("Stream", "LaunchConfig", "launch"))
    core = SimpleNamespace(ObjectCode=SimpleNamespace(from_cubin=lambda _: code), **of_name)
    refused = (SimpleNamespace(name="CUDA_ERROR_NOT_FOUND"), 0, 0)
    driver = SimpleNamespace(cuLibraryGetGlobal=lambda *_: refused)
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    with pytest.raises(CudaError, match="cuLibraryGetGlobal: CUDA_ERROR_NOT_FOUND"):
        ipc_kernels.CudaKernels(b"code")


# --- the protocol, under ThreadSanitizer: nothing is read that was not published ---


def soak(num_calls: int, seed: int, stall_us: int, first_epoch: int = 1, drop: int = 0) -> int:
    """Run the soak program on four ranks and return how it ended."""
    program = build(4, "-g", "-fsanitize=thread")
    arguments = [num_calls, seed, stall_us, first_epoch, drop]
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, timeout=DEADLINE_S
    ).returncode


def test_calls_of_all_kinds_are_right_to_the_bit() -> None:
    assert soak(60 if RUNS_ALL else 30, seed=1, stall_us=0) == 0


def test_slow_ranks_and_epoch_overflow_change_nothing() -> None:
    assert soak(40 if RUNS_ALL else 20, seed=2, stall_us=300, first_epoch=0xFFFFFFF0) == 0


@pytest.mark.parametrize("part", first_of(1, [RELEASE, DOUBLE_BUFFER, EXIT]))
def test_every_part_of_the_protocol_is_needed(part: int) -> None:
    assert soak(20, seed=3, stall_us=100, drop=part) == RACE
