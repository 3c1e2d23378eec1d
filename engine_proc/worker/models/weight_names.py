"""Maps tensors of files to weights."""

import re
from collections.abc import Callable, Mapping

import numpy as np

from headrace.engine_proc.worker.checkpoints.expert_stacks import unstacked
from headrace.engine_proc.worker.checkpoints.head_matrices import with_heads
from headrace.engine_proc.worker.checkpoints.weights import Weight, Weights
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.models.weight_source import WeightSource
from headrace.errors import ModelError

Naming = Callable[[DecoderSpec, Mapping[str, Weight]], dict[str, WeightSource]]


def adopt(spec: DecoderSpec, tensors: Mapping[str, Weight], naming: Naming) -> Weights:
    """Give the tensors of a file our names.

    Raises:
        ModelError: a tensor is missing, has another shape than the spec says, or is left over.
    """
    shapes = weight_shapes(spec)
    tensors = unstacked(tensors, transposed_stacks(spec, tensors))
    if (latent := spec.latent) is not None:
        sizes = (spec.num_heads, latent.nope_dim, latent.value_dim)
        tensors = with_heads(tensors, *sizes)
    sources = naming(spec, tensors)
    num_rows: dict[str, int] = {}  # of each tensor: a fused one holds several weights
    for name, shape in shapes.items():
        tensor = sources[name].tensor
        num_rows[tensor] = num_rows.get(tensor, 0) + shape[0]
    weights: dict[str, Weight] = {}
    for name, shape in shapes.items():
        stored = sources[name].tensor
        if stored not in tensors:
            raise ModelError(f"tensor {stored!r} is missing")
        wanted = (num_rows[stored], *shape[1:])
        if tensors[stored].shape != wanted:
            raise ModelError(
                f"tensor {stored!r} has shape {list(tensors[stored].shape)}, "
                f"but a {spec.architecture} model of this config has {list(wanted)}"
            )
        weights[name] = sources[name].weight_of(tensors[stored], shape[0])
    for name in tensors.keys() - num_rows.keys():
        if not (is_unread(name, spec) or is_redundant(name, tensors, sources)):
            raise ModelError(
                f"tensor {name!r} is not part of a {spec.architecture} model of this config"
            )
    return weights


def transposed_stacks(spec: DecoderSpec, tensors: Mapping[str, Weight]) -> set[str]:
    """Return the stacks of experts that are transposed: published folders of Qwen3-VL have them.

    Others of this family do not, so their shapes tell. One of the two is not square, and tells of
    both.
    """
    mixture = next((layer.mixture for layer in spec.layers if layer.mixture is not None), None)
    if spec.architecture != "qwen3_vl_moe_text" or mixture is None:
        return set()
    size = mixture.intermediate_size
    shapes = {
        "experts.gate_up_proj": (2 * size, spec.hidden_size),
        "experts.down_proj": (spec.hidden_size, size),
    }
    stacks = {
        name: shape for name in tensors for stack, shape in shapes.items() if name.endswith(stack)
    }
    are_transposed = any(
        tensors[name].shape[1:] == shape[::-1] != shape for name, shape in stacks.items()
    )
    return set(stacks) if are_transposed else set()


def is_redundant(
    name: str, tensors: Mapping[str, Weight], sources: Mapping[str, WeightSource]
) -> bool:
    """Whether a left-over tensor is redundant: frequencies, a copy of the embedding, zeros.

    Old checkpoints hold `rotary_emb.inv_freq`, some tied ones `lm_head.weight`; GGUF files have
    divisors of frequencies, which `lower_gguf` has read; AutoGPTQ wrote biases that no model has.
    Layers that predict further tokens are not executed, nor are indexers of sparse attention.
    """
    layer = LAYER_NAME.match(name)
    if name.startswith(("model.mtp_", "mtp.")) or (
        layer and layer[0] + layer_end(layer[1]) in tensors
    ):
        return True
    if INDEXER in name:
        return True
    if name.endswith(".bias"):
        return not tensors[name].to_float32().any()
    if name.endswith("lm_head.weight"):
        embed = tensors[sources["embed"].tensor].stored()
        return np.array_equal(tensors[name].stored().data, embed.data)
    return name.endswith("rotary_emb.inv_freq") or name in GGUF_ROPE


GGUF_ROPE = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}


def is_unread(name: str, spec: DecoderSpec) -> bool:
    """Whether a tensor is of keys or values, in a layer that reads those of another."""
    match = OF_KEYS.fullmatch(name)
    index = int(match[1]) if match else len(spec.layers)
    return index < len(spec.layers) and spec.layers[index].keys_of is not None


OF_KEYS = re.compile(
    r"(?:model\.|blk\.)(?:layers\.)?(\d{1,6})\.(?:self_attn|attn)[._][kv](?:_proj|_norm)?\.weight"
)
INDEXER = ".self_attn.indexer."
LAYER_NAME = re.compile(r"(model\.layers|blk)\.\d+\.")


def layer_end(prefix: str) -> str:
    """Return the name, within its layer, of a matrix that only layers of further tokens have."""
    return "nextn.eh_proj.weight" if prefix == "blk" else "eh_proj.weight"


# Of a model that takes images: what is not its decoder's, and where that is.
TOWERS = (
    "visual.",
    "vision_tower.",
    "multi_modal_projector.",
    "image_newline",
    "model.visual.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.image_newline",
    "model.vision_model.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.connector.",
)
DECODERS = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}


def of_decoder(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """Name the tensors of the decoder within a larger model as if there were nothing else."""
    return {decoder_name(name): tensor for name, tensor in tensors.items()}


def decoder_name(name: str) -> str:
    """Return a tensor's name without where its decoder is."""
    for outer, inner in DECODERS.items():
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name
