"""Names the weights of transformers' vision towers in GGUF's projector files, with their shapes.

Tensor names: `gguf.constants.TENSOR_NAMES`, of the `gguf` package.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from headrace.errors import ModelError
from headrace.model.gguf import GgufFile
from headrace.model.mmproj import ClipMetadata, Mmproj

Shape = tuple[int, ...]


class TensorLayout(Enum):
    """How tensors of a file make a weight."""

    PLAIN = "the one tensor"
    ROWS = "rows of one after those of the other"
    FRAMES = "a tensor for each frame, of kernels that span some"
    ONE_PLUS = "the one tensor, less the one that the converter has added"


class TowerWeight(NamedTuple):
    """The tensors of a file that make a weight, and the shape that each of them has."""

    tensors: tuple[str, ...]
    shape: Shape
    layout: TensorLayout = TensorLayout.PLAIN


Named = Iterator[tuple[str, TowerWeight]]
LAYER = {  # of SigLIP and CLIP
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}  # in files of older converters


def tower_weights(mmproj: Mmproj) -> dict[str, TowerWeight]:
    """Return the weights of a tower and its projector, by their names in transformers' module.

    Raises:
        ModelError: a tensor is missing, has another shape than the metadata says, or is left over.
    """
    weights = dict(FAMILIES[mmproj.family](mmproj.clip, mmproj.row_size))
    if is_swapped(mmproj.clip, mmproj.file):
        weights = {name: swapped(weight) for name, weight in weights.items()}
    check(weights, mmproj.file)
    return weights


def check(weights: Mapping[str, TowerWeight], file: GgufFile) -> None:
    """Check that a file has these weights and no others."""
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    wanted = {name: weight.shape for weight in weights.values() for name in weight.tensors}
    for name, shape in wanted.items():
        if name not in shapes:
            raise ModelError(f"{file.path}: tensor {name!r} is missing")
        if shapes[name] != shape:
            raise ModelError(
                f"{file.path}: tensor {name!r} has shape {list(shapes[name])}, but a tower of this "
                f"metadata has {list(shape)}"
            )
    if further := shapes.keys() - wanted.keys():
        raise ModelError(
            f"{file.path}: tensor {min(further)!r} is not part of a tower of this metadata"
        )


def is_swapped(clip: ClipMetadata, file: GgufFile) -> bool:
    """Whether `ffn_up` and `ffn_down` have each other's names."""
    narrow, wide = clip.embedding_length, clip.feed_forward_length
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    return narrow != wide and shapes.get("v.blk.0.ffn_down.weight") == (wide, narrow)


def swapped(weight: TowerWeight) -> TowerWeight:
    """Return a weight under the names of older converters."""
    return weight._replace(
        tensors=tuple(
            ".".join(SWAPPED.get(part, part) for part in name.split(".")) for name in weight.tensors
        )
    )


def pair(theirs: str, ours: str, *shape: int) -> Named:
    """Name the weight and the bias of a module."""
    yield f"{theirs}.weight", TowerWeight((f"{ours}.weight",), shape)
    yield f"{theirs}.bias", TowerWeight((f"{ours}.bias",), shape[:1])


def vision_transformer(clip: ClipMetadata, prefix: str, num_positions: int) -> Named:
    """Name the weights that SigLIP and CLIP share."""
    hidden, inner = clip.embedding_length, clip.feed_forward_length
    positions = TowerWeight(("v.position_embd.weight",), (num_positions, hidden))
    yield f"{prefix}embeddings.position_embedding.weight", positions
    shapes: dict[str, Shape] = {"ln1": (hidden,), "ln2": (hidden,)}
    shapes |= {"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    for i in range(clip.block_count):
        for theirs, ours in LAYER.items():
            shape = shapes.get(ours, (hidden, hidden))
            yield from pair(f"{prefix}encoder.layers.{i}.{theirs}", f"v.blk.{i}.{ours}", *shape)


def siglip(clip: ClipMetadata, prefix: str) -> Named:
    """Name the weights of SigLIP."""
    patch = (clip.embedding_length, 3, clip.patch_size, clip.patch_size)
    yield from pair(f"{prefix}embeddings.patch_embedding", "v.patch_embd", *patch)
    yield from vision_transformer(clip, prefix, clip.side**2)
    yield from pair(f"{prefix}post_layernorm", "v.post_ln", clip.embedding_length)


def idefics3(clip: ClipMetadata, row_size: int) -> Named:
    """Name the weights of Idefics3 and SmolVLM."""
    yield from siglip(clip, "vision_model.")
    width = clip.embedding_length * (clip.scale_factor or 2) ** 2
    projector = TowerWeight(("mm.model.fc.weight",), (row_size, width))
    yield "connector.modality_projection.proj.weight", projector


def gemma3(clip: ClipMetadata, row_size: int) -> Named:
    """Name the weights of Gemma 3."""
    yield from siglip(clip, "vision_tower.")
    hidden = clip.embedding_length
    norm = TowerWeight(("mm.soft_emb_norm.weight",), (hidden,), TensorLayout.ONE_PLUS)
    yield "multi_modal_projector.mm_soft_emb_norm.weight", norm
    projection = TowerWeight(("mm.input_projection.weight",), (hidden, row_size))
    yield "multi_modal_projector.mm_input_projection_weight", projection


def llava(clip: ClipMetadata, row_size: int) -> Named:
    """Name the weights of LLaVA, with CLIP's tower."""
    hidden, prefix = clip.embedding_length, "vision_tower."
    patch = (hidden, 3, clip.patch_size, clip.patch_size)
    yield f"{prefix}embeddings.class_embedding", TowerWeight(("v.class_embd",), (hidden,))
    embedding = TowerWeight(("v.patch_embd.weight",), patch)
    yield f"{prefix}embeddings.patch_embedding.weight", embedding
    yield from pair(f"{prefix}pre_layrnorm", "v.pre_ln", hidden)
    yield from vision_transformer(clip, prefix, clip.side**2 + 1)
    yield from pair("multi_modal_projector.linear_1", "mm.0", row_size, hidden)
    yield from pair("multi_modal_projector.linear_2", "mm.2", row_size, row_size)


def qwen2_5_vl(clip: ClipMetadata, row_size: int) -> Named:
    """Name the weights of Qwen2.5-VL."""
    hidden, inner = clip.embedding_length, clip.feed_forward_length
    frames = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    patch = (hidden, 3, clip.patch_size, clip.patch_size)
    embedding = TowerWeight(frames, patch, TensorLayout.FRAMES)
    yield "visual.patch_embed.proj.weight", embedding
    for i in range(clip.block_count):
        theirs, ours = f"visual.blocks.{i}", f"v.blk.{i}"
        for number in (1, 2):
            norm = TowerWeight((f"{ours}.ln{number}.weight",), (hidden,))
            yield f"{theirs}.norm{number}.weight", norm
        for kind, shape in (("weight", (hidden, hidden)), ("bias", (hidden,))):
            parts = tuple(f"{ours}.attn_{part}.{kind}" for part in "qkv")
            yield f"{theirs}.attn.qkv.{kind}", TowerWeight(parts, shape, TensorLayout.ROWS)
        yield from pair(f"{theirs}.attn.proj", f"{ours}.attn_out", hidden, hidden)
        yield from pair(f"{theirs}.mlp.gate_proj", f"{ours}.ffn_gate", inner, hidden)
        yield from pair(f"{theirs}.mlp.up_proj", f"{ours}.ffn_up", inner, hidden)
        yield from pair(f"{theirs}.mlp.down_proj", f"{ours}.ffn_down", hidden, inner)
    yield "visual.merger.ln_q.weight", TowerWeight(("v.post_ln.weight",), (hidden,))
    width = hidden * clip.spatial_merge_size**2
    yield from pair("visual.merger.mlp.0", "mm.0", width, width)
    yield from pair("visual.merger.mlp.2", "mm.2", row_size, width)


FAMILIES: dict[str, Callable[[ClipMetadata, int], Named]] = {
    "idefics3": idefics3,
    "gemma3": gemma3,
    "llava": llava,
    "qwen2_5_vl": qwen2_5_vl,
}
