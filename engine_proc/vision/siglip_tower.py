"""SigLIP towers in the C++ core, without torch.

SmolVLM, Idefics3, Gemma 3, LFM2-VL and PaliGemma have them.
A tile is a text of the core's encoder: its patches are the tokens, and all see each other. Tiles go
one by one, so the rows of an image depend on nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.vision.encoder import Tensors
from headrace.engine_proc.vision.mmproj_state import state_of
from headrace.engine_proc.vision.siglip_connectors import (
    Connector,
    linear,
    perceptron,
    pool,
    shuffle,
)
from headrace.engine_proc.vision.siglip_patches import (
    Grid,
    Patches,
    PatchSizes,
    flat_patches,
    square_tiles,
)
from headrace.engine_proc.vision.siglip_weights import below, layer_weights
from headrace.engine_proc.worker.checkpoints import safetensors
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weights
from headrace.engine_proc.worker.execution.cpu_encoder import seen_whole
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
from headrace.model.vision_families import decoder_config, siglip_config

PAGE_TOKENS = 32
MOST_PATCHES = 4096  # of a tile of SigLIP 2; LFM2-VL's have 1,024
Json = Mapping[str, Any]
MakeConnector = Callable[[ConfigFields, Weights, PatchSizes, int], Connector]


@dataclass(frozen=True)
class SiglipFamily:
    """A family whose tower is SigLIP.

    Attributes:
        tower, connector: beginnings of its weights' names.
    """

    tower: tuple[str, ...]
    connector: str
    make_patches: Callable[[Weights, PatchSizes], Patches]
    make_connector: MakeConnector


INNER = ("vision_tower.vision_model.", "vision_tower.")
TILES = SiglipFamily(("vision_model.",), "connector.", square_tiles, shuffle)
SIGLIP_FAMILIES = {
    "idefics3": TILES,
    "smolvlm": TILES,
    "gemma3": SiglipFamily(INNER, "multi_modal_projector.", square_tiles, pool),
    "lfm2_vl": SiglipFamily(INNER, "multi_modal_projector.", flat_patches, perceptron),
    "paligemma": SiglipFamily(INNER, "multi_modal_projector.", square_tiles, linear),
}


@dataclass(frozen=True)
class SiglipSpec:
    """The layers of a tower, and the patches that they see."""

    encoder: DecoderSpec
    sizes: PatchSizes


def spec_of(config: Json) -> SiglipSpec:
    """Return the tower of a model's config.

    Raises:
        ModelError: its sizes do not go together.
    """
    tower = siglip_config(config)
    fields = ConfigFields(tower, "a SigLIP tower")
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % num_heads:
        raise fields.wrong("num_attention_heads", "a divisor of 'hidden_size'")
    patch = fields.integer("patch_size")
    if "num_patches" in tower:  # SigLIP 2
        side, most = int(fields.integer("num_patches") ** 0.5), MOST_PATCHES
    else:
        side = fields.integer("image_size") // patch
        most = side**2
    encoder = DecoderSpec(
        architecture="siglip",
        vocab_size=1,  # tokens come in as rows
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        max_position=most,
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
        attention_scale=(hidden // num_heads) ** -0.5,
        encoder=EncoderSpec(),
    )
    return SiglipSpec(encoder, PatchSizes(hidden, patch, side, most))


class SiglipTower:
    """Computes rows of images in the core.

    Args:
        weights: by their names in transformers' module.
        is_exact: nothing is rounded; else as the core's decoders do by default.
    """

    def __init__(self, config: Json, spec: SiglipSpec, weights: Weights, is_exact: bool) -> None:
        family, sizes = SIGLIP_FAMILIES[config["model_type"]], spec.sizes
        own, fields = below(weights, *family.tower), ConfigFields(config, "a model with images")
        row_size = ConfigFields(decoder_config(config), "a decoder").integer("hidden_size")
        self._patches = family.make_patches(own, sizes)
        self._connect = family.make_connector(
            fields, below(weights, family.connector), sizes, row_size
        )
        self._executor = CpuExecutor(
            spec.encoder,
            layer_weights(spec.encoder, own),
            num_pages=-(-sizes.most // PAGE_TOKENS),
            page_tokens=PAGE_TOKENS,
            kv_dtype=KVDtype.FLOAT32 if is_exact else KVDtype.BFLOAT16,
            rounds_activations=not is_exact,
        )

    @classmethod
    def open(cls, config: ExecutionConfig) -> Self:
        """Open the tower of a folder or of a projector file, one that the core runs.

        Raises:
            ModelError: its files are not what they should be.
        """
        path = Path(config.mmproj or config.model_path)
        mmproj = config.mmproj and read_mmproj(path, read_metadata(Path(config.model_path)))
        known: Json = mmproj.folder.config if mmproj else read_json(path / "config.json")
        try:
            spec = spec_of(known)
            if mmproj:
                made = {name: StoredTensor.of(own) for name, own in state_of(mmproj).items()}
                return cls(known, spec, made, is_exact=True)
            weights = open_executable(path)
            return cls(known, spec, weights, is_exact=is_exact(config, weights))
        except ModelError as error:
            raise ModelError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error

    def encode(self, images: Sequence[Tensors]) -> list[Floats]:
        """Return the rows of each image, [rows, row_size], tile after tile.

        Raises:
            ValueError: a tile has another size than the tower takes, or is padded.
        """
        return [np.concatenate([*map(self._rows, self._patches(image))]) for image in images]

    def check(self) -> None:
        """A CPU does not fail for good."""

    def _rows(self, grid: Grid) -> Floats:
        """Return the rows of a tile."""
        tile = seen_whole(one_text(np.ascontiguousarray(grid.embeds, np.float32)), PAGE_TOKENS)
        states = self._executor.embed(tile)
        rows = self._connect(states.reshape(grid.height, grid.width, -1))
        return np.ascontiguousarray(rows, np.float32)


def open_executable(folder: Path) -> dict[str, StoredTensor]:
    """Return a folder's tensors of numbers, by their names in transformers' module.

    Position ids and parts of a quantized decoder, of other types, are not among them.
    """
    return {
        name.removeprefix("model."): StoredTensor(Format(own.dtype), tuple(own.shape), data)
        for name, (own, data) in safetensors.read_folder(folder, None).items()
        if own.dtype in safetensors.EXECUTABLE
    }


def one_text(embeds: Floats) -> Batch:
    """Return rows as the tokens of a text; each is asked for."""
    places = np.arange(len(embeds), dtype=np.int32)
    zeros = np.zeros_like(places)
    return Batch(
        token_ids=zeros,
        positions=places,
        sequences=zeros,
        page_table=zeros[:1, None],
        logit_rows=places,
        embed_rows=places,
        embeds=embeds,
    )


def is_exact(config: ExecutionConfig, weights: Weights) -> bool:
    """Whether nothing is to be rounded: `--dtype float32`, or weights stored so by default."""
    if config.dtype != "auto":
        return config.dtype == "float32"
    patches = (own for name, own in weights.items() if name.endswith("patch_embedding.weight"))
    return all(own.format == Format.F32 for own in patches)
