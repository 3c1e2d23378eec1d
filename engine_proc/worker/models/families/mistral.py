"""The dense families of Mistral AI."""

from collections.abc import Callable
from typing import Any

from headrace.engine_proc.worker.models.families.dense import decoder, rope_params, sliding, window
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    LayerSpec,
    QueryTemperature,
)
from headrace.engine_proc.worker.models.specs.rope import rope_table


def mistral(fields: ConfigFields) -> DecoderSpec:
    """Every layer slides, if any does."""
    layers = (LayerSpec(window=window(fields)),) * fields.integer("num_hidden_layers")
    return decoder(fields, layers=layers, num_kv_heads=fields.integer("num_key_value_heads"))


def ministral(fields: ConfigFields) -> DecoderSpec:
    """`layer_types` lists the sliding layers; without it, all slide."""
    return decoder(fields, layers=sliding(fields, lambda i: True))


MINISTRAL3_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def tempered_rope(fields: ConfigFields) -> tuple[dict[str, Any], QueryTemperature]:
    """Return the fields of RoPE alone, and the temperatures of queries that are among them."""
    params = {**(rope_params(fields) or MINISTRAL3_YARN)}
    own = ConfigFields(params, f"the RoPE of {fields.owner}")
    trained = own.integer("original_max_position_embeddings")
    tuned = QueryTemperature(scale=own.number("llama_4_scaling_beta"), tokens=trained, offset=0)
    params.pop("llama_4_scaling_beta")
    params.pop("max_position_embeddings", None)  # says the config's own again
    return params, tuned


def ministral3(fields: ConfigFields) -> DecoderSpec:
    """Mistral whose queries have temperatures beyond the trained length, by its RoPE's fields."""
    params, tuned = tempered_rope(fields)
    head_dim = fields.integer("head_dim", 128)
    table = rope_table(
        params,
        owner=fields.owner,
        head_dim=head_dim,
        max_position=fields.integer("max_position_embeddings"),
        theta=fields.number("rope_theta", 10_000.0),
    )
    layer = LayerSpec(window=window(fields), temperature=tuned)
    return decoder(
        fields,
        head_dim=head_dim,
        layers=(layer,) * fields.integer("num_hidden_layers"),
        ropes=(table,),
    )


MISTRALS: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "mistral": mistral,
    "ministral": ministral,
    "ministral3": ministral3,
}
