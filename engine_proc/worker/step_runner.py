"""Runs a worker's steps, and survives a lack of memory.

A step that runs out of memory fails on all workers, and the engine retries it as smaller steps. A
worker that died of it would lose the KV cache.
"""

import sys
from typing import Any

from headrace.engine_proc.collectives.collectives import CollectiveFailed, CollectiveOutcome
from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.shm.stage_links import StageLinks
from headrace.engine_proc.worker.execution.out_of_memory import is_out_of_memory
from headrace.engine_proc.worker.execution.runner import MaskSource, PendingResult, Runner
from headrace.errors import HeadraceError
from headrace.exit_status import ExitStatus
from headrace.ipc.worker_messages import Step, StepFailed, StepResult

FAILED_BEFORE = "it has failed in a stage before"


class TooLarge(HeadraceError):
    """A step ran out of memory, and the workers cannot recover: this one exits."""

    exit_status = ExitStatus.SHORT_OF


class StepRunner:
    """A worker's steps, each of which works on all workers or on none.

    Args:
        group: of the workers of a model, if there are several and it can be used again after an
            abort.
        is_alone: whether there is no other worker that computes the same layers.
        links: to other stages; none by default.
    """

    def __init__(
        self,
        runner: Runner,
        group: ShmAllReduce | None = None,
        is_alone: bool = True,
        links: StageLinks | None = None,
    ) -> None:
        self._runner = runner
        self._group = group
        self._links = links or StageLinks()
        self._can_fail = is_alone or group is not None
        self._has_failed = False

    def run(self, step: Step, masks_of: MaskSource) -> StepResult | StepFailed | PendingResult:
        """Run a step; after one that has failed none is run before `resume`, which has it again.

        Raises:
            TooLarge: there is no memory for it, and others wait for this worker.
        """
        has_worked = self._links.begin()
        if not has_worked and self._group is not None:
            self._group.abort()  # it may have worked in the stage before another worker
        result = self._run(step, masks_of) if has_worked else StepFailed(FAILED_BEFORE)
        self._links.end(works=not isinstance(result, StepFailed))
        return result

    def _run(self, step: Step, masks_of: MaskSource) -> StepResult | StepFailed | PendingResult:
        if self._has_failed:
            return StepFailed("a step before it has failed")
        try:
            return self._runner.run(step, masks_of)
        except Exception as error:
            why = self._explain(error, step.num_tokens)
        # By now the frames of the error are freed, and what they held.
        release()
        self._has_failed = True
        return StepFailed(why)

    def _explain(self, error: Exception, num_tokens: int) -> str:
        """Return why a step has failed, of which others know then; or raise, if it cannot."""
        if isinstance(error, CollectiveFailed):
            if (
                error.outcome is CollectiveOutcome.ABORTED
                and error.rank is not None
                and self._group
            ):
                return str(error)
            raise error
        if not is_out_of_memory(error) or num_tokens == 1:
            raise error
        why = f"there is no memory for a step of {num_tokens} tokens: {error}"
        if not self._can_fail:
            raise TooLarge(why) from error
        if self._group is not None:
            self._group.abort()
        return why

    def resume(self) -> None:
        """Run what comes from here on. All workers have answered all steps, and the group lives."""
        self._has_failed = False
        if self._group is not None:
            self._group.rejoin()


def release() -> None:
    """Give back what torch has from a GPU and does not use, if it is loaded."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
