"""How an encoder's layers are multiplied in the C++ core, as the flags say or as suits the machine.

With `--dtype auto` and Intel's tiles, vectors come from bf16. Their cosine with those in fp32 is
0.99998, and they take 0.37 of the time (bench/results/embeddings-amx.json). Where kernels for them
are fast, 16-bit integers come next. They are about as exact as fp16, and make scores, too.
"""

from collections.abc import Set
from dataclasses import dataclass

from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cpu_executor import prefers_fixed16
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.native_core import best_kernels

TILES = "avx512 with amx"  # of `best_kernels`
WIDE = frozenset({Format.F32, Format.F16, Format.BF16})


@dataclass(frozen=True)
class EncoderArithmetic:
    """The format of weights in memory, and whether activations are rounded only beside fixed16."""

    weight_dtype: WeightDtype
    is_exact: bool

    @property
    def name(self) -> str:
        """What is multiplied, for people."""
        match self.weight_dtype:
            case WeightDtype.FIXED16:
                return "16-bit integers (fixed16)"
            case WeightDtype.INT8 | WeightDtype.INT8_WEIGHT_ONLY | WeightDtype.BFLOAT16:
                return str(self.weight_dtype)
        return "float32" if self.is_exact else "bfloat16, of weights as stored"


def arithmetic_of(
    config: ExecutionConfig, weight_dtype: WeightDtype, model: DecoderModel
) -> EncoderArithmetic:
    """Return how the layers of an encoder are multiplied.

    Args:
        weight_dtype: as the flags have it.
    """
    assert model.pooling is not None
    if config.dtype != "auto" or config.quantization != "none":
        return EncoderArithmetic(weight_dtype, config.dtype == "float32")
    names = [name for name, shape in weight_shapes(model.spec).items() if len(shape) == 2]
    formats = {model.weights[name].format for name in names if name.startswith("layers.")}
    chosen = suited(formats, model.pooling.scores, best_kernels(), prefers_fixed16(formats))
    rounds_no_activations = chosen is WeightDtype.PACKED and model.stores_float32
    return EncoderArithmetic(chosen, chosen is WeightDtype.FIXED16 or rounds_no_activations)


def suited(formats: Set[Format], scores: bool, kernels: str, has_fast_fixed16: bool) -> WeightDtype:
    """Return the format of layers that are stored in `formats`; fewer bits stay as they are.

    Args:
        scores: a head makes one number of the vector.
        kernels: of the machine, as `best_kernels` has them.
        has_fast_fixed16: as `prefers_fixed16` has it.
    """
    if formats <= WIDE and kernels == TILES and not scores:
        return WeightDtype.BFLOAT16
    return WeightDtype.FIXED16 if has_fast_fixed16 else WeightDtype.PACKED
