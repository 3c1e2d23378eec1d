"""A Ray cluster of this machine, for tests: each node is a process and all that it starts."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
from servers import kill_tree, wait_until

from support.ports import reserved_port

RAY = str(Path(sys.executable).with_name("ray"))
NUM_CPUS = 2  # of each node: what one engine takes
STARTED = "Ray runtime started"
LEFT = """
import json, ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
states = [group["state"] for group in ray.util.placement_group_table().values()]
print("left:", json.dumps([ray.available_resources().get("CPU", 0), states]))
"""


class RayNode:
    """A node, which its cluster ends. `under` is a command that becomes the one after it."""

    def __init__(self, *args: str, under: Sequence[str] = ()) -> None:
        command = [*under, RAY, "start", "--block", "--disable-usage-stats", *args]
        limits = ("--num-cpus", str(NUM_CPUS), "--object-store-memory", "80000000")
        with tempfile.NamedTemporaryFile() as log:
            self._process = subprocess.Popen(
                [*command, *limits], stdout=log, stderr=subprocess.STDOUT, env=environment()
            )

            def has_started() -> bool:
                text = Path(log.name).read_text()
                assert self._process.poll() is None, text
                return STARTED in text

            wait_until(has_started, "a node of Ray's has started")

    @property
    def processes(self) -> list[psutil.Process]:
        """All that it has started and that has not ended."""
        found = psutil.Process(self._process.pid).children(recursive=True)
        return [one for one in found if title_of(one)]

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself, or was killed."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End it and all that it has started, by SIGKILL."""
        if not self.has_ended:
            kill_tree(self._process)


class RayCluster:
    """A head, which has room for an engine, and a node with room for another.

    Args:
        here: address of the head.
        there: address of the node.
        under: as `RayNode` has it, for the node.
    """

    def __init__(self, here: str, there: str, under: Sequence[str] = ()) -> None:
        self._folder = tempfile.mkdtemp(prefix="hr-ray-")
        with reserved_port() as port:
            self.address = f"{here}:{port}"
            flags = ("--head", "--port", str(port), "--include-dashboard", "false")
            place = ("--node-ip-address", here, "--temp-dir", self._folder)
            self._head = RayNode(*flags, *place)
        self._there, self._under = there, under
        self._nodes: list[RayNode] = []
        self.env = {"RAY_ADDRESS": self.address}
        self.start_node()

    def start_node(self, memory_bytes: int | None = None) -> None:
        """Start the node, for the first time or after its end; as `new_node`."""
        self._node = self.new_node(self._there, memory_bytes)

    def new_node(self, there: str, memory_bytes: int | None = None) -> RayNode:
        """Start a node, which has its own folder, as on another machine.

        Args:
            there: its address.
            memory_bytes: which its processes take to be all the memory of their machine.
        """
        own = [f"mount -t tmpfs none {self._folder}"]
        if memory_bytes is not None:
            info = Path(self._folder, "meminfo")
            info.write_text(meminfo_of(memory_bytes))
            own.insert(0, f"mount --bind {info} /proc/meminfo")
        script = " && ".join([*own, 'exec "$@"'])
        under = (*self._under, "unshare", "-m", "sh", "-c", script, "sh") if self._under else ()
        flags = ("--address", self.address, "--node-ip-address", there)
        node = RayNode(*flags, under=under)
        self._nodes.append(node)
        return node

    def revive_node(self) -> None:
        """Start the node anew where Ray has given it up."""
        if self._node.has_ended:
            self.start_node()

    def kill_node(self) -> None:
        """End the node with all that it has started."""
        self._node.kill()

    @property
    def node_processes(self) -> list[psutil.Process]:
        """All processes of the node."""
        return self._node.processes

    @property
    def processes(self) -> list[psutil.Process]:
        """All processes of both nodes."""
        return [*self._head.processes, *self.node_processes]

    @property
    def engine_processes(self) -> list[psutil.Process]:
        """Those of engines on both nodes."""
        return titled(self.processes, "headrace: ")

    @property
    def left(self) -> tuple[float, list[str]]:
        """How many CPUs are free, and the states of all placement groups."""
        done = subprocess.run(
            [sys.executable, "-c", LEFT],
            env=environment() | self.env,
            check=True,
            capture_output=True,
            text=True,
        )
        (told,) = re.findall(r"^left: (.*)$", done.stdout, re.MULTILINE)  # Ray prints, too
        found: Any = json.loads(told)
        return found[0], found[1]

    def close(self) -> None:
        """End it and leave nothing."""
        for node in self._nodes:
            node.kill()
        self._head.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def title_of(process: psutil.Process) -> str:
    """Return the first word of a process's command; "" where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return (process.cmdline() or [""])[0]
    return ""


def titled(processes: Iterable[psutil.Process], title: str) -> list[psutil.Process]:
    """Return the processes whose title begins so."""
    return [one for one in processes if title_of(one).startswith(title)]


def meminfo_of(num_bytes: int) -> str:
    """Return /proc/meminfo as on a machine with so much memory, all of it free."""
    kilobytes = num_bytes >> 10
    names = ("MemTotal", "MemFree", "MemAvailable")
    own = "".join(f"{name}: {kilobytes} kB\n" for name in names)
    lines = Path("/proc/meminfo").read_text().splitlines(keepends=True)
    return own + "".join(line for line in lines if not line.startswith(names))


def environment() -> dict[str, str]:
    """Return the environment of Ray's processes."""
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
