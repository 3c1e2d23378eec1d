"""Runs steps on a GPU: from a step to the tokens that are drawn in it."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.cuda_sampler import CudaSampler, Drawn
from headrace.engine_proc.worker.cuda.kernels.logprobs import HEAD_NUMBERS
from headrace.engine_proc.worker.cuda.phases import Phase, no_phase
from headrace.engine_proc.worker.cuda.sharded_ops import ShardedOps
from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.execution.runner import MaskSource, batch_of, no_masks, optional
from headrace.ipc.worker_messages import Step, StepResult


class Copied:
    """A `PendingResult`: what a step has drawn, on its way to the host."""

    def __init__(self, drawn: Drawn, shard_group: ShardedOps) -> None:
        self._shard_group, self._num_tops = shard_group, drawn.num_tops
        self._tokens = to_host(drawn.tokens)
        self._reports = None if drawn.reports is None else to_host(drawn.reports)
        self._event = torch.cuda.Event() if drawn.tokens.is_cuda else None
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
        self._shard_group.check()
        return StepResult(self._tokens.numpy().tobytes(), self.logprobs())

    def logprobs(self) -> bytes:
        """Return the log probabilities that are there, as in `StepResult`."""
        if self._reports is None:
            return b""
        numbers = self._reports.numpy()
        lengths = HEAD_NUMBERS + 2 * np.array(self._num_tops)
        return numbers[np.arange(numbers.shape[1]) < lengths[:, None]].tobytes()


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy that is there once the device has come so far."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


class CudaRunner:
    """A `Runner` that generates. Only `PendingResult.wait` waits for the device.

    Sampled tokens stay on the device as input of the next step, which may be launched before the
    host has read them.
    """

    def __init__(
        self,
        executor: CudaExecutor,
        sampler: CudaSampler,
        phase: Phase = no_phase,
        embeds: Floats | None = None,
    ) -> None:
        """`embeds` is the embedding area, [rows, hidden_size]."""
        self._executor = executor
        self._sampler = sampler
        self._phase = phase
        self._embeds = embeds

    @torch.inference_mode()
    def run(self, step: Step, masks_of: MaskSource = no_masks) -> Copied:
        """Launch one step. The masks are fetched after the forward pass is launched."""
        with self._phase("prepare"):
            batch = batch_of(step, step.logit_rows, self._embeds)
            batch = replace(batch, token_sources=optional(step.token_sources))
            self._sampler.send_rows(step)
        with self._phase("forward"):
            logits = self._executor.logits(batch)
        with self._phase("sampling"):
            drawn = self._sampler.sample(logits, step, masks_of)
        with self._phase("copy"):
            return Copied(drawn, self._executor.shard_group)
