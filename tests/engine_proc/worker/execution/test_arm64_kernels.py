"""Kernels of arm64 in an emulator, beside those of AVX2 in the extension: the same bits.

Products of bf16, where the processor has them, round otherwise: they are near.
`make wheel` names its wheel for arm64 in ARM64_WHEEL: then that wheel's core runs.
"""

import os
import platform
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from kernel_driver import DEADLINE_S, DRIVER, FLAGS, ROOT, compile_driver, compile_native, outputs

pytestmark = pytest.mark.slow

COMPILER = "aarch64-linux-gnu-g++"  # of Debian's package g++-aarch64-linux-gnu
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")  # of qemu-user-static, or qemu-user
SYSROOT = "/usr/aarch64-linux-gnu"  # with libraries of arm64
AVX2, NEON = 2, 4  # of `Isa`, csrc/cpu/kernels.h
PROCESSORS = {
    "cortex-a72": "neon",
    "neoverse-n1": "neon with dot products",
    "max": "neon with i8mm and bf16",
}
CONTRACTED = ("rotate pairs", "delta rule")  # compilers may fuse a product there with a sum
ROUNDED = "rounded"  # to bf16
PORTABLE = "kernels_portable.cpp"  # compiled, not called


def emulator() -> list[str | Path]:
    """Return the emulator's command; skip the test where it, the compiler or AVX2 is lacking."""
    found = [path for name in EMULATORS if (path := shutil.which(name))]
    if not found:
        pytest.skip("no qemu-aarch64 here: Debian's package qemu-user-static has it")
    if not shutil.which(COMPILER):
        pytest.skip(f"no {COMPILER} here: Debian's package g++-aarch64-linux-gnu has it")
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no AVX2 here to compare with")
    return [found[0], "-L", SYSROOT]


def compile_for_arm64(folder: Path, pool: ThreadPoolExecutor) -> Path:
    """Compile the driver and the core, but for its parts that know of Python, HTTP and text.

    As setup.py does: kernels alone, the slowest first, and small files as one. A wheel that is
    named has the core already.
    """
    if wheel := os.environ.get("ARM64_WHEEL"):
        with zipfile.ZipFile(wheel) as archive:
            core = archive.extract("headrace/_core.abi3.so", folder)
        return compile_driver(COMPILER, folder / "arm64", core)
    csrc = ROOT / "csrc"
    parts = ("cpu", "collectives", "sampling")
    paths = [path for part in parts for path in sorted((csrc / part).glob("*.cpp"))]
    alone = [path for path in paths if "kernels" in path.name or "rank_sums" in path.name]
    merged = folder / "merged.cpp"
    others = [path for path in [*paths, csrc / "futex.cpp"] if path not in alone]
    merged.write_text("".join(f'#include "{path}"\n' for path in others))
    sources = [*alone, merged, DRIVER]

    def compile_one(source: Path) -> Path:
        level = "-O0" if source.name == PORTABLE else "-O1"
        command = [COMPILER, *FLAGS, level, f"-I{csrc}", "-c", source]
        compiled = folder / f"{source.stem}.o"
        subprocess.run([*command, "-o", compiled], check=True, timeout=DEADLINE_S)
        return compiled

    program = folder / "arm64"
    command = [COMPILER, "-static", "-pthread", *pool.map(compile_one, sources), "-o", program]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return program


def error(found: bytes, expected: bytes) -> float:
    """Return how far floats are apart, relative to the largest."""
    x, y = (np.frombuffer(numbers, np.float32) for numbers in (found, expected))
    finite = np.isfinite(y)
    np.testing.assert_array_equal(x[~finite], y[~finite])
    x, y = x[finite], y[finite]
    return float(np.abs(x - y).max() / np.abs(y).max())


def test_arm64_kernels_give_the_bits_of_avx2(tmp_path: Path) -> None:
    """On each kind of processor; the driver also sees that no batch changes a row's bits."""
    qemu = emulator()
    with ThreadPoolExecutor(2) as pool:
        program = compile_for_arm64(tmp_path, pool)
        expected = outputs([compile_native(tmp_path), str(AVX2)])
        found = pool.map(
            lambda cpu: outputs([*qemu, "-cpu", cpu, program, str(NEON)], PROCESSORS[cpu]),
            PROCESSORS,
        )
        of_each = dict(zip(PROCESSORS, found, strict=True))
    for processor, records in of_each.items():
        assert records.keys() == expected.keys()
        for name, numbers in records.items():
            if name.startswith(CONTRACTED):
                assert error(numbers, expected[name]) < 1e-6, (processor, name)
            elif ROUNDED in name and processor == "max":
                limit = 1e-6 if name.startswith(ROUNDED + " bf16") else 0.02
                assert error(numbers, expected[name]) < limit, (processor, name)
            else:
                assert numbers == expected[name], (processor, name)
    assert len(expected) > 150
