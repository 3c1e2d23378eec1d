"""Processes of the ring that die of something, or wait for longer, for tests."""

import math
import os
import pkgutil
import signal
from array import array
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.board.board import Slot, State
from headrace.board.fields import CommonField
from headrace.config.process_configs import (
    DetokenizerConfig,
    EngineConfig,
    FetcherConfig,
    TokenizerConfig,
    WorkerConfig,
)
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Logits
from headrace.ipc.messages import HttpRequest
from headrace.runtime.process import Context
from headrace.supervision import watchdog
from headrace.tokenizer_proc.jobs.stages import Body, Stages

if TYPE_CHECKING:
    from headrace.detokenizer_proc.frames import Frames

CEILING_BYTES = 400 << 20  # of detokenizers, and 1 s of toil: see `sitecustomize.py`
IMPATIENCE_S = 1.0
PATIENCE_S = 600.0
DEADLY_TOKEN = 48000  # of the demo model
DEADLY_WORD = "arsenic"
FITTING_TOKENS = 24  # in a step, where more have no memory
STEP_S, DRAFT_STEP_S = 0.1, 0.01


def mutants(which: str) -> dict[str, str]:
    """Return the environment of a server with some of these processes."""
    return {"MUTANTS": which, "PYTHONPATH": str(Path(__file__).parent)}


def interpreted(which: str = "") -> dict[str, str]:
    """Return the environment of a server that interprets kernels, and has some processes, too."""
    return {"TRITON_INTERPRET": "1"} | mutants(f"worker=interpreter,{which}".rstrip(","))


def interpreter(config: WorkerConfig, context: Context) -> None:
    """Run a worker that interprets kernels quickly."""
    quick_interpreter = pkgutil.resolve_name("quick_interpreter:quick_interpreter")
    with quick_interpreter():
        pkgutil.resolve_name("headrace.engine_proc.worker.main:main")(config, context)


def impatient(config: EngineConfig, context: Context) -> None:
    """Run an engine that waits for the first process in a seat only until `SEEN` exists."""
    patience_s, seen = watchdog.patience_s, Path(os.environ["SEEN"])
    watchdog.patience_s = lambda slot, stuck_s: (
        IMPATIENCE_S if is_first(slot) and seen.exists() else patience_s(slot, stuck_s)
    )
    pkgutil.resolve_name("headrace.engine_proc.main:main")(config, context)


def is_first(slot: Slot) -> bool:
    return slot[CommonField.STARTS] == 1 and slot[CommonField.STATE] == State.STARTING


def steady(config: EngineConfig, context: Context) -> None:
    """Run an engine that takes steps of a kind to last equally, and prompts to last for ever.

    So drafts pay, and what the KV store has, however busy the machine is.
    """
    from headrace.engine_proc.drafts.step_costs import StepCosts
    from headrace.engine_proc.engine_core import EngineCore

    observe = StepCosts.observe

    def observe_alike(self: StepCosts, num_rows: int, seconds: float, *, is_draft: bool) -> None:
        observe(self, num_rows, DRAFT_STEP_S if is_draft else STEP_S, is_draft=is_draft)

    StepCosts.observe = observe_alike  # type: ignore[method-assign]
    EngineCore.prompt_s = lambda self, num_tokens: math.inf  # type: ignore[method-assign]
    pkgutil.resolve_name("headrace.engine_proc.main:main")(config, context)


def deadly_token(config: WorkerConfig, context: Context) -> None:
    """Run a worker that dies of a token; the first one hangs before it has loaded anything."""
    while context.slot[CommonField.STARTS] == 1:
        signal.pause()
    logits = CpuExecutor.logits

    def logits_or_die(self: CpuExecutor, batch: Batch) -> Logits:
        if DEADLY_TOKEN in batch.token_ids:
            os.kill(os.getpid(), signal.SIGSEGV)
        return logits(self, batch)

    CpuExecutor.logits = logits_or_die  # type: ignore[method-assign]
    pkgutil.resolve_name("headrace.engine_proc.worker.main:main")(config, context)


def deadly_word(config: TokenizerConfig, context: Context) -> None:
    """Run a tokenizer that dies of a word."""
    from headrace.tokenizer_proc.routes import Routes  # here, so that no other mutant waits for it

    handle = Routes.handle

    def handle_or_die(self: Routes, request: HttpRequest, body: Body) -> Stages:
        if DEADLY_WORD.encode() in bytes(body):
            os.kill(os.getpid(), signal.SIGSEGV)
        return handle(self, request, body)

    Routes.handle = handle_or_die  # type: ignore[method-assign]
    pkgutil.resolve_name("headrace.tokenizer_proc.main:main")(config, context)


def short_of_memory(config: WorkerConfig, context: Context) -> None:
    """Run workers of which the last has no memory for steps of more than some tokens."""
    logits = CpuExecutor.logits

    def logits_or_fail(self: CpuExecutor, batch: Batch) -> Logits:
        if (
            context.index == config.execution.num_workers - 1
            and len(batch.token_ids) > FITTING_TOKENS
        ):
            raise MemoryError("said the mutant")
        return logits(self, batch)

    CpuExecutor.logits = logits_or_fail  # type: ignore[method-assign]
    pkgutil.resolve_name("headrace.engine_proc.worker.main:main")(config, context)


def patient(config: FetcherConfig, context: Context) -> None:
    """Run a fetcher that waits for an image as long as a test may be stopped."""
    from headrace.tokenizer_proc.fetcher.download import Downloads

    init = Downloads.__init__
    Downloads.__init__ = partialmethod(init, time_s=PATIENCE_S)  # type: ignore[assignment]
    pkgutil.resolve_name("headrace.tokenizer_proc.fetcher.main:main")(config, context)


def glutton(config: DetokenizerConfig, context: Context) -> None:
    """Run a detokenizer that exceeds its memory limit on SIGUSR1; its successors cannot start."""
    if context.slot[CommonField.STARTS] > 1:
        raise RuntimeError("once and never again")
    hoard: list[bytes] = []
    signal.signal(signal.SIGUSR1, lambda *_: hoard.append(b"x" * (2 * CEILING_BYTES)))
    pkgutil.resolve_name("headrace.detokenizer_proc.main:main")(config, context)


def deadly_response(config: DetokenizerConfig, context: Context) -> None:
    """Run a detokenizer that dies of a generated token, in the core or outside, or of a long body.

    Of a long body it dies between two slices.
    """
    from headrace.detokenizer_proc.core_texts import CoreTexts
    from headrace.detokenizer_proc.inflight_responses import InflightResponses
    from headrace.detokenizer_proc.sequence_text import SequenceText

    feed_core, feed, render = CoreTexts.feed, SequenceText.feed, InflightResponses.render

    def die() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def feed_core_or_die(self: CoreTexts, *columns: Any) -> list[int]:
        unknown, start = feed_core(self, *columns), 0
        _, counts, _, tokens = columns
        ids = array("I", bytes(tokens))
        for row, count in enumerate(array("I", counts)):
            if row not in unknown and DEADLY_TOKEN in ids[start : start + count]:
                die()
            start += count
        return unknown

    def feed_or_die(self: SequenceText, ids: list[int], *rest: Any) -> Any:
        if DEADLY_TOKEN in ids:
            die()
        return feed(self, ids, *rest)

    def render_or_die(self: InflightResponses, frontend: int) -> "Frames | None":
        frames = render(self, frontend)
        if self.is_writing:
            die()
        return frames

    CoreTexts.feed = feed_core_or_die  # type: ignore[method-assign]
    SequenceText.feed = feed_or_die  # type: ignore[method-assign]
    InflightResponses.render = render_or_die  # type: ignore[method-assign]
    pkgutil.resolve_name("headrace.detokenizer_proc.main:main")(config, context)


def busybody(config: DetokenizerConfig, context: Context) -> None:
    """Run a detokenizer that from SIGUSR1 on sends heartbeats without work; its successors are
    healthy."""

    def beat(*_: object) -> None:
        while True:
            context.slot.beat()

    if context.slot[CommonField.STARTS] == 1:
        signal.signal(signal.SIGUSR1, beat)
    pkgutil.resolve_name("headrace.detokenizer_proc.main:main")(config, context)
