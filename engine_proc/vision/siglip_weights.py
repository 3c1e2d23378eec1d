"""The weights of SigLIP towers, by their names in transformers' modules."""

import numpy as np

from headrace.engine_proc.worker.checkpoints.weights import StoredTensor, Weights
from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.errors import ModelError

IN_LAYER = {  # by our names
    "attn_norm": "layer_norm1",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


def below(weights: Weights, *prefixes: str) -> Weights:
    """Return the weights whose names begin with one of these, the first that is there, without."""
    prefix = next((p for p in prefixes if any(name.startswith(p) for name in weights)), prefixes[0])
    return {
        name.removeprefix(prefix): own for name, own in weights.items() if name.startswith(prefix)
    }


def numbers(weights: Weights, name: str, *shape: int) -> Floats:
    """Return a weight's numbers.

    Raises:
        ModelError: it is missing, or has another shape.
    """
    if name not in weights:
        raise ModelError(f"weight {name!r} of the vision tower is missing")
    found = weights[name]
    if found.shape != shape:
        raise ModelError(
            f"weight {name!r} of the vision tower has shape {list(found.shape)}, not {list(shape)}"
        )
    return found.to_float32()


def layer_weights(spec: DecoderSpec, tower: Weights) -> Weights:
    """Return what the core reads, under our names."""
    theirs = {"norm": "post_layernorm"}
    for i in range(len(spec.layers)):
        theirs |= {f"layers.{i}.{o}": f"encoder.layers.{i}.{t}" for o, t in IN_LAYER.items()}
    found = {"embed": StoredTensor.of(np.zeros((1, spec.hidden_size), np.float32))}
    for ours, module in theirs.items():
        for suffix, end in (("", ".weight"), (".bias", ".bias")):
            name = f"{module}{end}"
            if name not in tower:
                raise ModelError(f"weight {name!r} of the vision tower is missing")
            found[f"{ours}{suffix}"] = tower[name].stored()
    return found
