"""Servers to be measured, and their cost: start time, memory, CPU time."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Self

import httpx
import psutil

from support.ports import reserved_port

START_S = 400
POLL_INTERVAL_S = 0.01  # between looks at whether a starting server answers
STOP_S = 20
ANSWER_S = 120  # for what takes milliseconds, where a load takes all cores
LOG_LINES = 15
# As after an install by pip. Where PYTHONDONTWRITEBYTECODE is set, each process of an editable
# install compiles its modules again.
COMPILED_ONCE = {"PYTHONDONTWRITEBYTECODE": ""}


class StartFailed(Exception):
    """A server ended before it served; the text is the end of its log."""

    @property
    def reason(self) -> str:
        """The last line it printed."""
        return (str(self).splitlines() or ["it said nothing"])[-1]


def end(number: int, _frame: FrameType | None) -> None:
    """End this process by an exception."""
    raise SystemExit(128 + number)


class Server:
    """A server of any kind, in a process group of its own."""

    def __init__(
        self,
        command: list[str],
        port: int,
        env: dict[str, str] | None = None,
        health: str = "/health",
    ) -> None:
        """Start it and wait until `health` answers with 200, or raise `StartFailed`.

        From then on SIGTERM ends this process as SystemExit, so that no server outlives it.
        """
        signal.signal(signal.SIGTERM, end)
        self._health = health
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self.started_at = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **COMPILED_ONCE, **(env or {})},
            start_new_session=True,
        )
        try:
            self._wait_healthy()
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - self.started_at

    def _wait_healthy(self) -> None:
        # One client for all looks: to make one takes 30 ms of a core that the server starts on.
        with httpx.Client(verify=False, timeout=5) as client:  # it is plain HTTP
            while time.perf_counter() - self.started_at < START_S:
                if self._process.poll() is not None:
                    raise StartFailed(self.log_end())
                try:
                    if client.get(f"{self.url}{self._health}").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(POLL_INTERVAL_S)
        raise StartFailed(f"not healthy after {START_S} s; its log ends:\n{self.log_end()}")

    def log(self) -> str:
        """Return all that it printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def log_end(self) -> str:
        """Return the last lines it printed."""
        return "\n".join(self.log().splitlines()[-LOG_LINES:])

    @property
    def processes(self) -> list[psutil.Process]:
        """All processes of the server."""
        main = psutil.Process(self._process.pid)
        return [main, *main.children(recursive=True)]

    def memory_bytes(self) -> tuple[int, int]:
        """Return what its processes have in memory: shared pages shared out, then counted often."""
        infos = [process.memory_full_info() for process in self.processes]
        return sum(info.pss for info in infos), sum(info.rss for info in infos)

    def cpu_s(self) -> float:
        """Return the processor time it has used so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)

    def metric(self, name: str) -> float | None:
        """Return a metric's value summed over processes, or None if there is no such metric."""
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWER_S).text
        values = re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in values) if values else None

    def suspend(self) -> None:
        """Have it use no processor until it is resumed."""
        for process in self.processes:
            process.suspend()

    def resume(self) -> None:
        """Have it go on."""
        for process in reversed(self.processes):
            process.resume()

    def close(self) -> None:
        """Stop it, and everything that belongs to it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def headrace(*args: str) -> Server:
    """Start Headrace with these arguments, from the environment this runs in."""
    with reserved_port() as port:
        command = [str(Path(sys.executable).parent / "launch_server"), "--port", str(port), *args]
        return Server(command, port)


def vllm(python: str, model: Path, *args: str) -> Server:
    """Start vLLM on all our cores, with the OpenMP its docs advise where that came with it."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    openmp = Path(python).parents[1] / "lib" / "libiomp5.so"
    if openmp.exists():
        env["LD_PRELOAD"] = str(openmp)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-num-seqs", "64"]
    command += ["--served-model-name", model.name, "--max-model-len", "4096", *args]
    with reserved_port() as port:
        return Server([*command, "--port", str(port)], port, env)
