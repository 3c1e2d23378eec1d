"""The program that calls kernels with random input (kernel_outputs.cpp): made, and run."""

import importlib.util
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "engine_proc" / "worker" / "execution" / "kernel_outputs.cpp"
FLAGS = ("-std=c++17", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", "-pthread")
DEADLINE_S = 600.0


def compile_native(folder: Path) -> Path:
    """Compile the driver for this machine; the extension has the core."""
    core = importlib.util.find_spec("headrace._core")
    assert core is not None and core.origin is not None
    return compile_driver("g++", folder / "native", core.origin)


def compile_driver(compiler: str, program: Path, core: Path | str) -> Path:
    """Compile the driver; a shared library, which lacks Python, has the core."""
    lacks_python = "-Wl,--unresolved-symbols=ignore-in-shared-libs"
    command = [compiler, *FLAGS, f"-I{ROOT / 'csrc'}", DRIVER, core, lacks_python]
    subprocess.run([*command, "-o", program], check=True, timeout=DEADLINE_S)
    return program


def outputs(command: list[str | Path], expected: str | None = None) -> dict[str, bytes]:
    """Run the driver; return its records by name. Kernels on it are `expected`."""
    result = subprocess.run(command, capture_output=True, timeout=DEADLINE_S)
    told = result.stderr.decode().splitlines()
    assert result.returncode == 0, told
    assert expected is None or told[0] == expected
    records: dict[str, bytes] = {}
    rest = memoryview(result.stdout)
    while rest:
        end = bytes(rest[:200]).index(b"\n")
        name, size = bytes(rest[:end]).decode().split("\t")
        records[name] = bytes(rest[end + 1 : end + 1 + int(size)])
        rest = rest[end + 1 + int(size) :]
    return records
