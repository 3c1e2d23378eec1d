"""Measure the time to the first response, and memory and CPU time when idle.

Method: `launch_server` with the demo model, repeatedly. The first run, which fills the page cache,
        is discarded. Memory is read some seconds after one answer: resident counts a page that two
        processes share twice, proportional counts it once.
        A new Python process starts the server of tests (`headrace.testing`); its imports count.
Run:    python bench/startup.py --rounds 5
"""

import os
import subprocess
import sys
import time

from support import models
from support.report import Quantity, Report, parser
from support.servers import COMPILED_ONCE, headrace
from support.streams import complete

MIB = 2**20
SETTLE_S = 3.0  # until modules are imported that load after the start, in the background
IDLE_S = 2.0


SCRIPTED = (
    "from headrace.testing import ScriptedServer; ScriptedServer(); print(flush=True); input()"
)


def scripted_ready_s() -> float:
    """Return how long a test waits for its server."""
    started_at = time.perf_counter()
    command = [sys.executable, "-c", SCRIPTED]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        env=os.environ | COMPILED_ONCE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "the server did not start"
        return time.perf_counter() - started_at


def measure() -> dict[tuple[str, str], float]:
    """Start a server, ask it once, leave it alone for a while; return each quantity and unit."""
    found: dict[tuple[str, str], float] = {}
    found["a test's server to ready", "s"] = scripted_ready_s()
    with headrace(str(models.demo_model())) as server:
        found["start to healthy", "s"] = server.start_s
        complete(server.url, [models.text_tokens(16)], max_tokens=1)
        found["start to first token", "s"] = time.perf_counter() - server.started_at
        time.sleep(SETTLE_S)
        proportional, resident = server.memory_bytes()
        used = server.cpu_s()
        time.sleep(IDLE_S)
        found["processor time when idle, share of a core", "%"] = (
            100 * (server.cpu_s() - used) / IDLE_S
        )
        found["memory, proportional", "MiB"] = proportional / MIB
        found["memory, resident", "MiB"] = resident / MIB
        for process in server.processes:
            name = process.cmdline()[0].removeprefix("headrace: ")
            found[f"memory, proportional, {name}", "MiB"] = process.memory_full_info().pss / MIB
    return found


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=5).parse_args()
    report = Report("startup", args)
    rounds = [measure() for _ in range(args.rounds + 1)][1:]
    for name, unit in rounds[0]:
        samples = [found[name, unit] for found in rounds]
        report.add(Quantity(name, unit, {"headrace": samples}))
    report.finish()


if __name__ == "__main__":
    main()
