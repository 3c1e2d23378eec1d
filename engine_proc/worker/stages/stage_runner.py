"""Runs steps on a stage of a pipeline, between the links to its neighbors."""

from dataclasses import replace

import numpy as np

from headrace.engine_proc.shm.stage_links import StageLinks
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Floats, Logits
from headrace.engine_proc.worker.execution.runner import MaskSource, batch_of, no_masks
from headrace.ipc.worker_messages import Step, StepResult


class LastStage:
    """An `Executor` whose tokens come in as the hidden states of the stage before."""

    def __init__(self, executor: CpuExecutor, links: StageLinks) -> None:
        self._executor = executor
        self._links = links

    def logits(self, batch: Batch) -> Logits:
        """As `Executor` has it."""
        return self._executor.logits(with_hidden(batch, self._links.hidden))

    def embed(self, batch: Batch) -> Floats:
        """As `Executor` has it."""
        return self._executor.embed(with_hidden(batch, self._links.hidden))


class StageRunner:
    """A `Runner` of the stages before the last: they draw nothing, and pass all tokens on."""

    def __init__(self, executor: CpuExecutor, links: StageLinks) -> None:
        self._executor = executor
        self._links = links

    def run(self, step: Step, _masks_of: MaskSource = no_masks) -> StepResult:
        """Run one step."""
        rows = np.arange(step.num_tokens, dtype=np.int32)
        batch = with_hidden(batch_of(step, rows.tobytes()), self._links.hidden)
        self._executor.step(batch, hidden=self._links.room(step.num_tokens))
        return StepResult(b"", b"")


def with_hidden(batch: Batch, hidden: Floats | None) -> Batch:
    """Return a batch whose tokens come in as hidden states, if there are some."""
    if hidden is None:
        return batch
    rows = np.arange(len(hidden), dtype=np.int32)
    return replace(batch, embed_rows=rows, embeds=hidden)
