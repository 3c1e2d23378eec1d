"""Runs steps on a GPU: from a step to the tokens that are drawn in it."""

import torch

from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.device_sampler import DeviceSampler
from headrace.engine_proc.worker.runner import MaskSource, batch_of, no_masks
from headrace.messages import Step, StepResult


class CudaRunner:
    """A `Runner` that generates. The host waits for a step's tokens and for nothing else."""

    def __init__(self, executor: CudaExecutor, sampler: DeviceSampler) -> None:
        self._executor = executor
        self._sampler = sampler

    @torch.inference_mode()
    def run(self, step: Step, masks_of: MaskSource = no_masks) -> StepResult:
        """Run one step. The masks are asked for when the forward pass is on its way.

        Raises:
            CollectiveFailed: another worker is gone.
        """
        logits = self._executor.logits(batch_of(step, step.logit_rows))
        tokens, logprobs = self._sampler.sample(logits, step, masks_of)
        token_ids = tokens.cpu().numpy()
        self._executor.team.check()
        return StepResult(token_ids.tobytes(), logprobs)
