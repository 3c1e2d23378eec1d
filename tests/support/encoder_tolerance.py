"""How near what an encoder or a reranker says is to transformers in fp32, by `--dtype auto`."""

from headrace.engine_proc.worker.encoder_arithmetic import TILES
from headrace.native_core import best_kernels


def tolerance(exact: float, in_bf16: float) -> float:
    """Return the greatest difference on this machine: Intel's tiles multiply in bf16."""
    return in_bf16 if best_kernels() == TILES else exact
