"""Processes of the ring that die of something, for tests."""

import os
import pkgutil
import signal
from array import array
from typing import Any

from headrace.board import Field
from headrace.config import DetokenizerConfig, WorkerConfig
from headrace.engine_proc.worker.runner import GenerationRunner, MaskSource, no_masks
from headrace.messages import Step, StepResult
from headrace.process import Context

CEILING_BYTES = 400 << 20  # of detokenizers, see `sitecustomize.py`
DEADLY_TOKEN = 48000  # of the demo model


def deadly_token(config: WorkerConfig, context: Context) -> None:
    """Be a worker that dies of a token."""
    run: Any = GenerationRunner.run

    def run_or_die(
        self: GenerationRunner, step: Step, masks_of: MaskSource = no_masks
    ) -> StepResult:
        if DEADLY_TOKEN in array("i", step.token_ids):
            os.kill(os.getpid(), signal.SIGSEGV)
        result: StepResult = run(self, step, masks_of)
        return result

    GenerationRunner.run = run_or_die  # type: ignore[method-assign]
    pkgutil.resolve_name("headrace.engine_proc.worker.main:main")(config, context)


def glutton(config: DetokenizerConfig, context: Context) -> None:
    """Be a detokenizer that takes more than its ceiling on SIGUSR1; its successors cannot start."""
    if context.slot[Field.STARTS] > 1:
        raise RuntimeError("once and never again")
    hoard: list[bytes] = []
    signal.signal(signal.SIGUSR1, lambda *_: hoard.append(b"x" * (2 * CEILING_BYTES)))
    pkgutil.resolve_name("headrace.detokenizer_proc.main:main")(config, context)
