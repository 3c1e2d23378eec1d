"""Reads adapters that llama.cpp's tools write: a GGUF file of `.lora_a` and `.lora_b` tensors."""

import math
from pathlib import Path

from headrace.engine_proc.worker.adapters.expert_factors import of_tensor
from headrace.engine_proc.worker.adapters.factors import AdapterRefused, Factors
from headrace.engine_proc.worker.checkpoints.gguf_tensors import open_tensors
from headrace.errors import ModelError
from headrace.model.gguf import read_metadata

ALPHA = "adapter.lora.alpha"
A, B = ".lora_a", ".lora_b"


def read_gguf(path: Path) -> dict[str, Factors]:
    """Return the factors of an adapter by tensor, of experts by part; see `expert_stacks`.

    Raises:
        AdapterRefused: the file is broken, or is something else.
    """
    try:
        file = read_metadata(path)
        tensors = open_tensors(file)
    except ModelError as error:
        raise AdapterRefused(str(error)) from None
    kind, alpha = file.metadata.get("adapter.type"), file.metadata.get(ALPHA)
    if kind != "lora" or not isinstance(alpha, float) or not math.isfinite(alpha):
        raise AdapterRefused(f"{path}: adapter.type is {kind!r}, {ALPHA} {alpha!r}; not an adapter")
    factors: dict[str, Factors] = {}
    for name, a in tensors.items():
        changed = name.removesuffix(A)
        if name.endswith(A) and changed + B in tensors:
            factors |= of_tensor(changed, Factors(a, tensors[changed + B], alpha))
        elif not (name.endswith(B) and name.removesuffix(B) + A in tensors):
            raise AdapterRefused(f"{path}: tensor {name!r} is no factor of a linear layer")
    return factors
