"""Layers of checkpoints that predict tokens beyond the next (multi-token prediction), as drafts.

DeepSeek V3 and GLM have such a layer behind all others (`num_nextn_predict_layers`):

    hidden' = layer(eh_proj . [enorm(embed(next token)), hnorm(hidden)])

and a norm before the head. Qwen3-Next and Qwen3.5 have the same under other names (`mtp.`). The
hidden state is what the head sees, of the model and of the layer itself, as in vLLM. Embedding and
head are the model's. Of several such layers the first one drafts.
"""

from collections.abc import Mapping
from dataclasses import replace

from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_source import WeightSource
from headrace.errors import ModelError

MTP = "mtp"  # of --speculative
QWEN_LAYER = "mtp.layers.0."
QWEN_NAMES = {
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.norm.weight": "shared_head.norm.weight",
}
NAMES = {
    "mtp.proj": "eh_proj.weight",
    "mtp.embed_norm": "enorm.weight",
    "mtp.hidden_norm": "hnorm.weight",
    "mtp.norm": "shared_head.norm.weight",
}
GGUF_NAMES = {
    "mtp.proj": "nextn.eh_proj.weight",
    "mtp.embed_norm": "nextn.enorm.weight",
    "mtp.hidden_norm": "nextn.hnorm.weight",
    "mtp.norm": "nextn.shared_head_norm.weight",
}


def with_mtp_layer(spec: DecoderSpec) -> DecoderSpec:
    """Return a decoder with a layer that drafts: it is as the last one that attends."""
    attending = (layer for layer in reversed(spec.layers) if layer.has_pages)
    layer = next(attending, spec.layers[-1])
    return replace(spec, layers=(*spec.layers, layer), num_mtp_layers=1)


def as_deepseek(spec: DecoderSpec, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """Give the tensors of Qwen's layer the names of DeepSeek's."""
    prefix = f"model.layers.{len(spec.layers) - 1}."
    names = {name: prefix + theirs for name, theirs in QWEN_NAMES.items()}
    for name in tensors:
        if name.startswith(QWEN_LAYER):
            names[name] = prefix + name.removeprefix(QWEN_LAYER)
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def mtp_sources(
    spec: DecoderSpec, prefix: str, names: Mapping[str, str], tensors: Mapping[str, Weight]
) -> dict[str, WeightSource]:
    """Name the tensors around the layer that drafts, if the decoder has one.

    Args:
        prefix: of the names of all layers.

    Raises:
        ModelError: the file has no such layer.
    """
    if not spec.num_mtp_layers:
        return {}
    theirs = f"{prefix}{len(spec.layers) - 1}."
    if theirs + names["mtp.proj"] not in tensors:
        raise ModelError(
            "--speculative mtp: it has no layer that predicts further tokens "
            f"({theirs}{names['mtp.proj']}); use --speculative ngram or --draft-model"
        )
    return {ours: WeightSource(theirs + name) for ours, name in names.items()}
