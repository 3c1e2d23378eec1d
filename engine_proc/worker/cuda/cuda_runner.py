"""Runs steps on a GPU: from a step to the tokens that are drawn in it."""

from dataclasses import replace

import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.device_sampler import DeviceSampler
from headrace.engine_proc.worker.cuda.phases import Phase, no_phase
from headrace.engine_proc.worker.cuda.team import Team
from headrace.engine_proc.worker.runner import MaskSource, batch_of, no_masks, optional
from headrace.messages import Step, StepResult


class DrawnTokens:
    """A `Promise`: tokens on their way to the host.

    Args:
        logprobs: as in `StepResult`.
    """

    def __init__(self, tokens: Tensor, logprobs: bytes, team: Team) -> None:
        self._logprobs, self._team = logprobs, team
        is_gpu = tokens.is_cuda
        self._tokens = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=is_gpu)
        self._tokens.copy_(tokens, non_blocking=True)
        self._event = torch.cuda.Event() if is_gpu else None
        if self._event is not None:
            self._event.record()

    @property
    def is_there(self) -> bool:
        """Whether `wait` would not wait."""
        return self._event is None or self._event.query()

    def wait(self) -> StepResult:
        """Return the result when it is there.

        Raises:
            CollectiveFailed: another worker is gone.
        """
        if self._event is not None:
            self._event.synchronize()
        self._team.check()
        return StepResult(self._tokens.numpy().tobytes(), self._logprobs)


class CudaRunner:
    """A `Runner` that generates. Nothing waits for the device but who asks for the result.

    Tokens that a step draws stay on the device for the next one, which may have been sent before
    the host has seen them.
    """

    def __init__(
        self, executor: CudaExecutor, sampler: DeviceSampler, phase: Phase = no_phase
    ) -> None:
        self._executor = executor
        self._sampler = sampler
        self._phase = phase

    @torch.inference_mode()
    def run(self, step: Step, masks_of: MaskSource = no_masks) -> DrawnTokens:
        """Launch one step. The masks are asked for when the forward pass is on its way."""
        with self._phase("prepare"):
            batch = replace(batch_of(step, step.logit_rows), relays=optional(step.relays))
        with self._phase("forward"):
            logits = self._executor.logits(batch)
        with self._phase("sampling"):
            tokens, logprobs = self._sampler.sample(logits, step, masks_of)
        with self._phase("copy"):
            self._executor.buffers.drawn[: len(tokens)].copy_(tokens)
            return DrawnTokens(tokens, logprobs, self._executor.team)
