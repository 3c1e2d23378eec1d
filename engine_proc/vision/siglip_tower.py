"""SigLIP towers in the C++ core, without torch: those of SmolVLM, Idefics3 and Gemma 3.

A tile is a text of the core's encoder: its patches are the tokens, and all see each other. Tiles go
one by one, so the rows of an image depend on nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from headrace import __version__
from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.vision.encoder import Tensors
from headrace.engine_proc.vision.mmproj_state import state_of
from headrace.engine_proc.worker.checkpoints import safetensors
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weights
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.model import read_json
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    EncoderSpec,
    LayerSpec,
    Norm,
)
from headrace.errors import ModelError
from headrace.model.gguf import read_metadata
from headrace.model.mmproj import read_mmproj
from headrace.model.vision_families import siglip_config

PAGE_TOKENS = 32
IN_LAYER = {
    "attn_norm": "layer_norm1",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "mlp_norm": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
Json = Mapping[str, Any]
Project = Callable[[Floats], Floats]  # from hidden states, [side, side, hidden], to rows


@dataclass(frozen=True)
class SiglipFamily:
    """A family whose tower is SigLIP.

    Attributes:
        tower, connector: beginnings of its weights' names.
        project: returns the connector, of a config, its weights and the tower's spec.
    """

    tower: tuple[str, ...]
    connector: str
    project: Callable[[ConfigFields, Weights, "SiglipSpec"], Project]


@dataclass(frozen=True)
class SiglipSpec:
    """The layers of a tower, and the patches that they see."""

    encoder: DecoderSpec
    patch_size: int
    side: int  # of a tile, in patches


def shuffle(fields: ConfigFields, weights: Weights, spec: SiglipSpec) -> Project:
    """Idefics3 and SmolVLM: squares of adjacent patches side by side, projected."""
    scale = fields.integer("scale_factor", 2)
    matrix = numbers(weights, "modality_projection.proj.weight")
    hidden = spec.encoder.hidden_size
    if spec.side % scale or matrix.shape[1] != hidden * scale**2:
        raise fields.wrong("scale_factor", f"one that fits {spec.side} patches a side")

    def project(states: Floats) -> Floats:
        side = spec.side // scale
        squares = states.reshape(side, scale, side, scale * hidden).swapaxes(1, 2)
        rows: Floats = squares.reshape(side * side, -1) @ matrix.T
        return rows

    return project


def pool(fields: ConfigFields, weights: Weights, spec: SiglipSpec) -> Project:
    """Gemma 3: the mean of squares of patches, normalized and projected."""
    side = int(fields.integer("mm_tokens_per_image", 256) ** 0.5)
    if spec.side % side:
        raise fields.wrong("mm_tokens_per_image", f"one that fits {spec.side} patches a side")
    matrix = numbers(weights, "mm_input_projection_weight")
    scale = 1 + numbers(weights, "mm_soft_emb_norm.weight")
    width = spec.side // side
    eps = np.float32(spec.encoder.norm_eps)

    def project(states: Floats) -> Floats:
        means = states.reshape(side, width, side, width, -1).mean(axis=(1, 3)).reshape(side**2, -1)
        squares = np.square(means).mean(axis=1, keepdims=True)
        rows: Floats = (means / np.sqrt(squares + eps) * scale) @ matrix
        return rows

    return project


TILES = SiglipFamily(("vision_model.",), "connector.", shuffle)
SIGLIP_FAMILIES = {
    "idefics3": TILES,
    "smolvlm": TILES,
    "gemma3": SiglipFamily(
        ("vision_tower.vision_model.", "vision_tower."), "multi_modal_projector.", pool
    ),
}


def spec_of(config: Json) -> SiglipSpec | None:
    """Return the tower of a model's config; None where transformers' modules run it.

    Raises:
        ModelError: its sizes do not go together.
    """
    tower = siglip_config(config)
    if tower is None:
        return None
    fields = ConfigFields(tower, "a SigLIP tower")
    patch_size = fields.integer("patch_size")
    side = fields.integer("image_size") // patch_size
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % num_heads:
        raise fields.wrong("num_attention_heads", "a divisor of 'hidden_size'")
    head_dim = hidden // num_heads
    encoder = DecoderSpec(
        architecture="siglip",
        vocab_size=1,  # tokens come in as rows
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position=side**2,
        layers=(LayerSpec(rope=None),) * fields.integer("num_hidden_layers"),
        ropes=(),
        norm=Norm.LAYER,
        norm_bias=True,
        norm_eps=fields.positive("layer_norm_eps"),
        activation=Activation.GELU_TANH,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        attention_scale=head_dim**-0.5,
        encoder=EncoderSpec(),
    )
    return SiglipSpec(encoder, patch_size, side)


class SiglipTower:
    """Computes rows of images in the core.

    Args:
        weights: by their names in transformers' module.
        is_exact: nothing is rounded; else as the core's decoders do by default.
    """

    def __init__(self, config: Json, spec: SiglipSpec, weights: Weights, is_exact: bool) -> None:
        family = SIGLIP_FAMILIES[config["model_type"]]
        own = below(weights, *family.tower)
        patch = numbers(own, "embeddings.patch_embedding.weight")
        self._kernel = patch.reshape(len(patch), -1)
        bias = numbers(own, "embeddings.patch_embedding.bias")
        self._positions = numbers(own, "embeddings.position_embedding.weight") + bias
        hidden, num_tokens = spec.encoder.hidden_size, spec.side**2
        wanted = ((hidden, 3 * spec.patch_size**2), (num_tokens, hidden))
        if (self._kernel.shape, self._positions.shape) != wanted:
            raise ModelError(f"a tower's patches and positions have shapes other than {wanted}")
        fields = ConfigFields(config, f"a {config['model_type']} model")
        self._project = family.project(fields, below(weights, family.connector), spec)
        self._spec = spec
        self._executor = CpuExecutor(
            spec.encoder,
            layer_weights(spec.encoder, own),
            num_pages=-(-num_tokens // PAGE_TOKENS),
            page_tokens=PAGE_TOKENS,
            kv_dtype=KVDtype.FLOAT32 if is_exact else KVDtype.BFLOAT16,
            rounds_activations=not is_exact,
        )
        self.maker = f"headrace {__version__} {self._executor.isa} {is_exact}"

    @classmethod
    def open(cls, config: ExecutionConfig) -> Self | None:
        """Open the tower of a folder or of a projector file; None where torch has to run it.

        Raises:
            ModelError: its files are not what they should be.
        """
        if config.load_format == "dummy":
            return None
        path = Path(config.model_path)
        mmproj = config.mmproj and read_mmproj(Path(config.mmproj), read_metadata(path))
        known: Json = mmproj.folder.config if mmproj else read_json(path / "config.json")
        spec = spec_of(known)
        if spec is None:
            return None
        try:
            if mmproj:
                made = {name: StoredTensor.of(own) for name, own in state_of(mmproj).items()}
                return cls(known, spec, made, is_exact=True)
            stored = safetensors.open_folder(path)
            weights = {name.removeprefix("model."): own for name, own in stored.items()}
            return cls(known, spec, weights, is_exact=is_exact(config, weights))
        except ModelError as error:
            raise ModelError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error

    def encode(self, images: Sequence[Tensors]) -> list[Floats]:
        """Return the rows of each image, [rows, row_size], tile after tile.

        Raises:
            ValueError: a tile has another size than the tower's, or is padded.
        """
        return [np.concatenate([*map(self._rows, self._tiles(image))]) for image in images]

    def check(self) -> None:
        """A CPU does not fail for good."""

    def _tiles(self, image: Tensors) -> npt.NDArray[np.float32]:
        """Return the tiles of an image, [tiles, 3, edge, edge]."""
        edge = self._spec.side * self._spec.patch_size
        pixels = image["pixel_values"]
        mask = image.get("pixel_attention_mask")
        if pixels.shape[-3:] != (3, edge, edge) or not (mask is None or mask.all()):
            raise ValueError(f"tiles are {pixels.shape}, not 3 x {edge} x {edge} without padding")
        tiles: npt.NDArray[np.float32] = pixels.reshape(-1, 3, edge, edge)
        return tiles

    def _rows(self, tile: npt.NDArray[np.float32]) -> Floats:
        """Return the rows of a tile."""
        side, size = self._spec.side, self._spec.patch_size
        patches = tile.reshape(3, side, size, side, size).transpose(1, 3, 0, 2, 4)
        embeds = patches.reshape(side * side, -1) @ self._kernel.T + self._positions
        states = self._executor.embed(seen_whole(embeds))
        return np.ascontiguousarray(self._project(states.reshape(side, side, -1)), np.float32)


def seen_whole(embeds: Floats) -> Batch:
    """Return rows as a text whose tokens see each other; each is asked for."""
    places = np.arange(len(embeds), dtype=np.int32)
    zeros = np.zeros_like(places)
    return Batch(
        token_ids=zeros,
        positions=places,
        sequences=zeros,
        page_table=np.arange(-(-len(embeds) // PAGE_TOKENS), dtype=np.int32)[None],
        logit_rows=places,
        embed_rows=places,
        embeds=embeds,
        last_seen=np.full_like(places, len(embeds) - 1),
    )


def is_exact(config: ExecutionConfig, weights: Weights) -> bool:
    """Whether nothing is to be rounded: `--dtype float32`, or weights stored so by default."""
    if config.dtype != "auto":
        return config.dtype == "float32"
    patches = (own for name, own in weights.items() if name.endswith("patch_embedding.weight"))
    return all(own.format == Format.F32 for own in patches)


def below(weights: Weights, *prefixes: str) -> Weights:
    """Return the weights whose names begin with one of these, the first that is there, without."""
    prefix = next((p for p in prefixes if any(name.startswith(p) for name in weights)), prefixes[0])
    return {
        name.removeprefix(prefix): own for name, own in weights.items() if name.startswith(prefix)
    }


def numbers(weights: Weights, name: str) -> Floats:
    """Return a weight's numbers; raises `ModelError` where it is missing."""
    if name not in weights:
        raise ModelError(f"weight {name!r} of the vision tower is missing")
    return weights[name].to_float32()


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
