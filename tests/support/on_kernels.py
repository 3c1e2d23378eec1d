"""Kernels of GPUs in place of the C++ core, in tests of whole engines."""

import os
from typing import Any

import torch

from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Floats, Logits
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class OnKernels:
    """An `Executor` whose logits come to the host, in fp32."""

    def __init__(self, spec: DecoderSpec, weights: Weights, **options: Any) -> None:
        device = "cpu" if IS_INTERPRETED else "cuda"
        self._executor = CudaExecutor(spec, weights, device=device, dtype=torch.float32, **options)

    def logits(self, batch: Batch) -> Logits:
        return Logits(self._executor.forward(batch))

    def forward(self, batch: Batch) -> Floats:
        return self._executor.forward(batch)

    def embed(self, batch: Batch) -> Floats:
        return self._executor.embed(batch)
