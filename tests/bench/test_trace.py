"""Idle time is what no kernel and no copy covers, from one step's beginning to the next one's."""

import gzip
import json
from pathlib import Path

import pytest

from support.trace import Event, idleness, read_trace


def kernel(name: str, ts: float, dur: float, cat: str = "kernel") -> Event:
    return Event(name, cat, ts, dur)


def test_gaps_between_and_within_steps_count_once() -> None:
    events = [
        kernel("inputs_kernel", 100, 10),
        kernel("attention", 112, 8),  # 2 idle
        kernel("beside it", 114, 4),
        kernel("Memcpy HtoD", 125, 5, "gpu_memcpy"),  # 5 idle
        kernel("inputs_kernel", 130, 10),
        kernel("cudaLaunchKernel", 0, 500, "cuda_runtime"),
        kernel("inputs_kernel", 150, 10),  # 10 idle
    ]
    found = idleness(events[::-1])
    assert found.per_step_us == [7, 10]
    assert found.share == pytest.approx(17 / 50)


def test_a_trace_of_the_cpp_core_has_its_steps(tmp_path: Path) -> None:
    steps = [{"name": "step", "ph": "X", "ts": 10.0 * i, "dur": 8.0, "args": {}} for i in range(3)]
    path = tmp_path / "worker-0-1.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": steps}).encode()))
    found = idleness(read_trace(path))
    assert (found.per_step_us, found.share) == ([2.0, 2.0], pytest.approx(0.2))


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_trace_of_no_two_steps_is_refused(num_steps: int) -> None:
    with pytest.raises(SystemExit, match=f"the trace has {num_steps} steps; idle time is that"):
        idleness(num_steps * [Event("step", "", 5, 1)])
