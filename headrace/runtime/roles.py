"""The process table: roles, names and entry points.

Code is named by string and found in the child, so that no process loads what it does not run.
"""

import signal
from dataclasses import dataclass
from typing import Any

from headrace.config.process_configs import (
    DetokenizerConfig,
    EngineConfig,
    FetcherConfig,
    FrontendConfig,
    KvStoreConfig,
    PlacementConfig,
    StageConfig,
    TelemetryConfig,
    TokenizerConfig,
    VisionConfig,
    WorkerConfig,
)


@dataclass(frozen=True)
class Role:
    """One kind of process. `main` takes the config and the process's own `Context`."""

    main: str
    config: type[Any]
    numbered: bool = True
    niceness: int = 0
    is_urgent: bool = False  # takes a core from the others at once when there is something to do
    death_signal: signal.Signals = signal.SIGKILL  # sent by the kernel when the parent dies
    cleans_up: bool = (
        False  # runs its `finally` blocks at SIGTERM; SIGTERM kills the others at once
    )


ROLES = {
    # A frontend outlives the supervisor by a moment, to remove the run directory.
    "frontend": Role(
        "headrace.frontend.main:main",
        FrontendConfig,
        is_urgent=True,
        death_signal=signal.SIGTERM,
        cleans_up=True,
    ),
    # Those that encode give way to the frontends and the step when cores are short. A process can
    # give way by itself (`tokenizer_proc/main.py`), and not take it back.
    "tokenizer": Role("headrace.tokenizer_proc.main:main", TokenizerConfig, is_urgent=True),
    # The engine ends its workers.
    "engine": Role("headrace.engine_proc.main:main", EngineConfig, numbered=False, cleans_up=True),
    "worker": Role("headrace.engine_proc.worker.main:main", WorkerConfig, is_urgent=True),
    # Text goes on while images are encoded.
    "vision": Role("headrace.engine_proc.vision.main:main", VisionConfig, niceness=10),
    # Steps go on while it copies.
    "kv_store": Role("headrace.engine_proc.kv_store.main:main", KvStoreConfig, niceness=10),
    "fetcher": Role(
        "headrace.tokenizer_proc.fetcher.main:main", FetcherConfig, numbered=False, niceness=5
    ),
    "detokenizer": Role("headrace.detokenizer_proc.main:main", DetokenizerConfig),
    # The seat of a worker, to a machine that has that worker.
    "stage": Role(
        "headrace.engine_proc.stages.node:main", StageConfig, numbered=False, is_urgent=True
    ),
    # It leaves the cluster, which ends what it has placed.
    "placement": Role(
        "headrace.engine_proc.placement.main:main",
        PlacementConfig,
        numbered=False,
        niceness=5,
        cleans_up=True,
    ),
    # It handles the last reports before it ends.
    "telemetry": Role(
        "headrace.detokenizer_proc.telemetry.main:main",
        TelemetryConfig,
        numbered=False,
        niceness=5,
        cleans_up=True,
    ),
}


def title(role: str, index: int) -> str:
    """Return the process title that `ps` shows; that of a first engine has no number."""
    return f"headrace: {role} {index}" if ROLES[role].numbered or index else f"headrace: {role}"
