"""The decoders within models that take images, lowered as those that stand alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.errors import ModelError
from headrace.model.vision_families import (
    BIDIRECTIONAL,
    TEXT_ONLY,
    decoder_config,
    is_prefix_lm,
    num_deepstack,
    vision_family,
)

# Fields of a `text_config` that are not the decoder's: of generation, or of a connector.
NOT_THE_DECODERS = frozenset(
    {
        "length_penalty",
        "max_length",
        "neftune_noise_alpha",
        "num_beam_groups",
        "num_beams",
        "num_image_tokens",
        "num_return_sequences",
        "perceiver_config",
        "pixel_shuffle_factor",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)


def lower_vision(config: Mapping[str, Any]) -> DecoderSpec:
    """Lower the decoder of a `config.json` of one of `FAMILIES`, or of `TEXT_ONLY`.

    Raises:
        ModelError: as `lower_config` does, or the decoder makes more of a row than it is.
    """
    if config.get("quantization_config") and vision_family(config) is not None:
        raise ModelError("'quantization_config' of a model that takes images is not supported")
    fields = decoder_config(config).items()
    ignored = NOT_THE_DECODERS | {BIDIRECTIONAL} if is_prefix_lm(config) else NOT_THE_DECODERS
    spec = lower_config({name: value for name, value in fields if name not in ignored})
    if spec.per_layer is not None and vision_family(config) is not None:
        pad = decoder_config(config).get("pad_token_id", 0)
        if pad != 0:  # whose embedding for each layer a row of an image has
            raise ModelError(f"'pad_token_id' is {pad}, and can only be 0 beside images")
    multiplies_text = spec.architecture == "gemma3_text" or is_prefix_lm(config)
    is_text_only = config.get("model_type") in TEXT_ONLY
    if spec.embedding_multiplier != 1 and not (multiplies_text or is_text_only):
        raise ModelError(f"a {spec.architecture} model multiplies rows of images, too")
    return replace(spec, deepstack=num_deepstack(config))
