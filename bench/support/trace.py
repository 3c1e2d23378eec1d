"""Idle times in a worker's trace: of a GPU, or of the C++ core."""

import gzip
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
FIRST_KERNEL = "inputs_kernel"  # of a step: `worker/cuda/step_inputs.py`
STEP = "step"  # of the C++ core's trace


class Event(msgspec.Struct):
    """An event of a trace; microseconds."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


class Trace(msgspec.Struct):
    """A trace in Chrome's format."""

    traceEvents: list[Event] = []


@dataclass(frozen=True)
class Idleness:
    """Share of the time from the first step to the last in which nothing ran."""

    per_step_us: list[float]  # from a step's beginning to the next one's
    share: float


def read_trace(path: Path) -> list[Event]:
    """Return the events of a compressed trace."""
    return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Trace).traceEvents


def idleness(events: list[Event]) -> Idleness:
    """Return how idle the device was, between steps and within them.

    Raises:
        SystemExit: there is nothing between steps, for want of a second one.
    """
    on_gpu = [event for event in events if event.cat in ON_GPU]
    ran = sorted(on_gpu or [e for e in events if e.name == STEP], key=lambda event: event.ts)
    begins = [event.ts for event in ran if not on_gpu or FIRST_KERNEL in event.name]
    if len(begins) < 2:
        raise SystemExit(f"the trace has {len(begins)} steps; idle time is that between two")
    gaps = []  # where each begins, and its length
    end = ran[0].ts
    for event in ran:
        if event.ts > end:
            gaps.append((end, event.ts - end))
        end = max(end, event.ts + event.dur)
    idle = [sum(length for at, length in gaps if a <= at < b) for a, b in pairwise(begins)]
    return Idleness(idle, sum(idle) / (begins[-1] - begins[0]))
