"""A model as it lies on disk: its spec and its weights, ready for an executor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.engine_proc.worker.checkpoints import gguf_tensors, safetensors
from headrace.engine_proc.worker.checkpoints.quantized import (
    CONFIG_FIELDS,
    kv_scales_of,
    quantization_of,
    weights_of,
)
from headrace.engine_proc.worker.checkpoints.weights import Format, Weight, Weights
from headrace.engine_proc.worker.models import weight_names
from headrace.engine_proc.worker.models.dense_layers import (
    DenseLayer,
    dense_modules,
    head_layers,
    logit_layers,
    without_head,
)
from headrace.engine_proc.worker.models.dummy_weights import dummy_weights
from headrace.engine_proc.worker.models.encoder_names import (
    ENCODER_NAMES,
    POSITION_IDS,
    encoder,
    of_encoder,
)
from headrace.engine_proc.worker.models.folder_names import hugging_face
from headrace.engine_proc.worker.models.gguf_config import lower_gguf
from headrace.engine_proc.worker.models.gguf_names import gguf
from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.mtp import as_deepseek, with_mtp_layer
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.vision_config import lower_vision
from headrace.errors import BAD_JSON, ModelError
from headrace.model.config_json import decode_config, overridden
from headrace.model.gguf import read_metadata
from headrace.model.gguf_metadata import end_token_ids
from headrace.model.mmproj import read_mmproj
from headrace.model.pooling import TOKEN_FIELDS, Pooling, is_token_classifier, read_pooling
from headrace.model.vision_families import TEXT_ONLY, vision_family

NO_DUMMY = "{path}: --load-format dummy takes no cross-encoders, Dense modules and images"


class NotLowered(ModelError):
    """No `DecoderSpec` expresses the model; its files may still be sound."""


@dataclass(frozen=True)
class DecoderModel:
    """A decoder or an encoder on disk: the input of an executor."""

    spec: DecoderSpec
    weights: Weights
    eos_ids: tuple[int, ...]  # any of them ends a text; none if the model does not say
    pooling: Pooling | None = None  # of an embedding model; None generates
    dense: tuple[DenseLayer, ...] = ()  # behind the pooling
    kv_scales: tuple[
        tuple[float, float], ...
    ] = ()  # of layers' keys and values in 8 bits, if given

    @property
    def stores_float32(self) -> bool:
        """Whether its weights are stored in fp32, as its embedding is."""
        return self.weights["embed"].format == Format.F32


def open_model(
    path: Path | str,
    load_format: str = "auto",
    *,
    drafts: bool = False,
    hf_overrides: str | None = None,
) -> DecoderModel:
    """Open a Hugging Face folder or a .gguf file. Weights stay on disk until they are decoded.

    Args:
        load_format: "dummy" makes weights up, for a folder that may have none.
        drafts: with its layer that predicts further tokens; see `mtp.py`.
        hf_overrides: fields in place of those of its config, as the flag has them.

    Raises:
        NotLowered: the model cannot be executed exactly, by what its config says.
        ModelError: a file is missing, broken, or does not fit the others.
    """
    path = Path(path)
    if path.is_dir():
        return open_folder(path, load_format == "dummy", drafts, hf_overrides)
    if load_format == "dummy":
        raise ModelError(f"{path}: --load-format dummy takes a folder with config.json")
    if path.suffix == ".gguf":
        return open_gguf(path, drafts)
    raise ModelError(f"{path}: neither a folder nor a .gguf file")


def open_folder(
    folder: Path, is_dummy: bool, drafts: bool, hf_overrides: str | None
) -> DecoderModel:
    """Open a folder with `config.json` and safetensors, or with the config alone."""
    config = overridden(folder, read_json(folder / "config.json"), hf_overrides)
    takes_images = vision_family(config) is not None
    has_towers = takes_images or config.get("model_type") in TEXT_ONLY
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    try:
        quantization = None if takes_images else quantization_of(config)
        unread = {*CONFIG_FIELDS, *(TOKEN_FIELDS if is_token_classifier(config) else ())}
        plain = {name: value for name, value in config.items() if name not in unread}
        spec = lower_vision(config) if has_towers else lower_config(plain)
        spec = with_mtp_layer(spec) if drafts else spec
    except ModelError as error:
        raise NotLowered(f"{folder}: {error}") from error
    pooling = read_pooling(folder, config)
    if drafts and pooling is not None:
        raise ModelError(f"{folder}: drafts tokens; embedding models have none to draft")
    if spec.encoder is not None and pooling is None:
        raise ModelError(f"{folder}: its tokens see those to come, so it cannot generate")
    eos = eos_ids(generation) or eos_ids(config)
    if is_dummy:
        if has_towers or (pooling is not None and (pooling.scores or pooling.dense)):
            raise ModelError(NO_DUMMY.format(path=folder))
        return DecoderModel(spec, dummy_weights(spec), eos, pooling)
    but = weight_names.TOWERS if has_towers else POSITION_IDS
    stored = safetensors.open_folder(folder, but, is_quantized=quantization is not None)
    try:
        tensors = stored if quantization is None else weights_of(quantization, stored)
        if has_towers:
            tensors = weight_names.of_decoder(tensors)
        if drafts:
            tensors = as_deepseek(spec, tensors)
        is_tied = is_head_tied(spec, config, "lm_head.weight" in tensors, pooling is not None)
        spec = replace(spec, tied_head=is_tied)
        has_head = pooling is not None and pooling.scores and not pooling.score_tokens
        weights = adopt_folder(spec, without_head(config, tensors) if has_head else tensors)
        behind = weights, tensors
        dense = () if pooling is None else layers_behind(folder, config, spec, pooling, *behind)
    except ModelError as error:
        raise ModelError(f"{folder}: {str(error).removeprefix(f'{folder}: ')}") from error
    scales = () if quantization is None else kv_scales_of(stored, len(spec.layers))
    return DecoderModel(spec, weights, eos, pooling, dense, scales)


def is_head_tied(
    spec: DecoderSpec, config: Mapping[str, Any], is_stored: bool, is_pooled: bool
) -> bool:
    """Whether a model has no head of its own, by its config and by what is stored.

    An embedding model needs none. Of a model that takes images, older configs do not say it.
    """
    if is_pooled and not is_stored:
        return True
    is_silent = vision_family(config) is not None and "tie_word_embeddings" not in config
    return spec.tied_head and not (is_silent and is_stored)


def layers_behind(
    folder: Path,
    config: Mapping[str, Any],
    spec: DecoderSpec,
    pooling: Pooling,
    weights: Weights,
    tensors: Weights,
) -> tuple[DenseLayer, ...]:
    """Read the layers behind a pooling; `tensors` are those of the files."""
    if pooling.score_tokens:
        return logit_layers(spec, weights, pooling.score_tokens, pooling.activation)
    if pooling.scores:
        return head_layers(config, tensors, pooling.activation)
    return dense_modules(folder, pooling, spec.hidden_size)


def adopt_folder(spec: DecoderSpec, tensors: Mapping[str, Weight]) -> Weights:
    """Give a folder's tensors our names."""
    if spec.architecture in ENCODER_NAMES:
        return weight_names.adopt(spec, of_encoder(spec, tensors), encoder)
    return weight_names.adopt(spec, tensors, hugging_face)


def open_gguf(path: Path, drafts: bool) -> DecoderModel:
    """Open a single-file model."""
    file = read_metadata(path)
    tensors = gguf_tensors.open_tensors(file)
    try:
        spec = lower_gguf(file.metadata, tensors)
        spec = with_mtp_layer(spec) if drafts else spec
        weights = weight_names.adopt(spec, tensors, gguf)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return DecoderModel(spec, weights, end_token_ids(file.metadata))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        return decode_config(path.read_bytes())
    except (OSError, *BAD_JSON) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def config_with_images(path: Path, mmproj: str | None) -> Mapping[str, Any]:
    """Return the config of a model that takes images, or one made of its projector file's.

    Raises:
        ModelError: a file cannot be read, or the projector does not fit the model.
    """
    if mmproj is None:
        return read_json(path / "config.json")
    return read_mmproj(Path(mmproj), read_metadata(path)).folder.config


def eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return `eos_token_id`, which is one id, a list of them, or absent."""
    ids = config.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(id for id in ids if isinstance(id, int))
