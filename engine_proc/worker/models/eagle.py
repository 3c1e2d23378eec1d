"""EAGLE-3's folders: a layer that drafts tokens for a model (Li et al., 2025).

Published for many models, as by SpecForge: tensors `midlayer.*` or `layers.0.*`, `fc`, `norm`,
`lm_head`, and `d2t`. The head knows the most frequent tokens only; token i of it is token
`i + d2t[i]` of the model. The embedding is the model's, unless the folder has one. So is a head
that knows all tokens.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints import safetensors
from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.models.folder_names import hugging_face
from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.model import DecoderModel, read_json
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, EagleSpec
from headrace.engine_proc.worker.models.weight_names import adopt
from headrace.engine_proc.worker.models.weight_source import WeightSource
from headrace.errors import ModelError

EAGLE3 = "eagle3"  # of --speculative
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Beside those of a Llama. Configs made of the model's name its windows, which the layer lacks.
OWN_FIELDS = (
    "draft_vocab_size",
    "eagle_config",
    AUX_LAYERS,
    "max_window_layers",
    "norm_before_residual",
    "sliding_window",
    "target_hidden_size",
    "target_model_type",
    "use_sliding_window",
)
EMBED, LAYER = "model.embed_tokens.weight", "model.layers.0."
TABLES = ("d2t", "t2d")
OFFSETS = {"I64": "<i8", "I32": "<i4"}  # of d2t


def open_eagle(folder: Path, model: DecoderModel) -> tuple[DecoderModel, npt.NDArray[np.int64]]:
    """Open a layer that drafts for a model; return it, and the model's ids of its tokens.

    Raises:
        ModelError: the folder has no such layer, or one for another model.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: EAGLE-3 takes a folder with config.json and safetensors")
    config = read_json(folder / "config.json")
    try:
        spec = eagle_spec(config, model.spec)
        stored: dict[str, Weight] = {**safetensors.open_folder(folder, TABLES)}
        tensors = {published_name(name): tensor for name, tensor in stored.items()}
        tensors.setdefault(EMBED, model.weights["embed"])
        if spec.vocab_size == model.spec.vocab_size:
            head = model.weights.get("head", model.weights["embed"])
            tensors.setdefault("lm_head.weight", head)
        if "fc.weight" not in tensors:
            raise ModelError("has no tensor 'fc.weight': it is no EAGLE-3 layer")
        weights = adopt(spec, tensors, eagle_names)
        token_ids = drafted_ids(folder, spec)
    except ModelError as error:
        raise ModelError(f"{folder}: {str(error).removeprefix(f'{folder}: ')}") from error
    return DecoderModel(spec, weights, model.eos_ids), token_ids


def eagle_spec(config: dict[str, Any], model: DecoderSpec) -> DecoderSpec:
    """Lower the config of a layer that drafts for a model.

    Raises:
        ModelError: it is not of that kind, or for a model of other sizes.
    """
    plain = {name: value for name, value in config.items() if name not in OWN_FIELDS}
    if "mrope_section" in (plain.get("rope_scaling") or {}):
        del plain["rope_scaling"]  # of a model with images, behind which nothing is drafted
    spec = lower_config({**plain, "model_type": "llama", "tie_word_embeddings": False})
    if len(spec.layers) != 1:
        raise ModelError(f"has {len(spec.layers)} layers; EAGLE-3 drafts with one")
    if (spec.hidden_size, spec.vocab_size) != (model.hidden_size, model.vocab_size):
        raise ModelError(
            f"drafts for {spec.vocab_size} tokens and a hidden size of {spec.hidden_size}; the "
            f"model has {model.vocab_size} and {model.hidden_size}"
        )
    own = EagleSpec(
        tapped=tapped_layers(config, len(model.layers)),
        num_embedded=model.vocab_size,
        norms_residual=bool(config.get("norm_before_residual", False)),
    )
    head_size = config.get("draft_vocab_size") or spec.vocab_size
    return replace(spec, vocab_size=head_size, num_mtp_layers=1, eagle=own)


def tapped_layers(config: dict[str, Any], num_layers: int) -> tuple[int, int, int]:
    """Return the layers of the model whose inputs are read.

    A config names those before them, whose outputs these are, as SpecForge and SGLang do.

    Raises:
        ModelError: they are not three, or not the model's.
    """
    own = config.get("eagle_config") or {}
    ids = own.get(AUX_LAYERS, config.get(AUX_LAYERS))
    layers = [2, num_layers // 2, num_layers - 3] if ids is None else [id + 1 for id in ids]
    if len(layers) != 3 or not all(0 <= layer < num_layers for layer in layers):
        raise ModelError(f"reads what enters the layers {layers} of a model of {num_layers} layers")
    return layers[0], layers[1], layers[2]


def published_name(name: str) -> str:
    """Return the name in a Llama of a tensor of the layer."""
    name = name.removeprefix("model.")
    for own in ("midlayer.", "layers.0."):
        if name.startswith(own):
            return LAYER + name.removeprefix(own)
    return f"model.{name}" if name in ("norm.weight", "embed_tokens.weight") else name


def eagle_names(spec: DecoderSpec, tensors: Any) -> dict[str, WeightSource]:
    """Name the tensors of a layer that drafts."""
    own = {"mtp.proj": "fc.weight", "mtp.hidden_norm": f"{LAYER}hidden_norm.weight"}
    without = replace(spec, num_mtp_layers=0)
    sources = {ours: WeightSource(theirs) for ours, theirs in own.items()}
    return {**hugging_face(without, tensors), **sources}


def drafted_ids(folder: Path, spec: DecoderSpec) -> npt.NDArray[np.int64]:
    """Return the model's ids of the head's tokens.

    Raises:
        ModelError: they are missing, or beyond the model's tokens.
    """
    assert spec.eagle is not None
    ids = np.arange(spec.vocab_size)
    tables = safetensors.read_folder(folder, None)
    if "d2t" in tables:
        entry, data = tables["d2t"]
        if entry.dtype not in OFFSETS:
            read = " and ".join(OFFSETS)
            raise ModelError(f"d2t has numbers of the type {entry.dtype}; {read} are read")
        offsets = data.view(OFFSETS[entry.dtype])
        if len(offsets) != len(ids):
            raise ModelError(f"d2t names {len(offsets)} tokens, not {len(ids)}")
        ids = ids + offsets
    elif spec.vocab_size != spec.eagle.num_embedded:
        raise ModelError("has no tensor 'd2t', which tells the tokens that its head knows")
    if ids.min() < 0 or ids.max() >= spec.eagle.num_embedded:
        raise ModelError(f"d2t names tokens beyond the model's {spec.eagle.num_embedded}")
    return ids
