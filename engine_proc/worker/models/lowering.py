"""Model configs, lowered to a `DecoderSpec`.

A family is a function from its config's fields to a spec. Unknown fields are refused unless they
are known to change nothing. A new variant of a known family therefore fails when it is opened
instead of answering nonsense.
"""

from collections.abc import Mapping
from typing import Any

from headrace.engine_proc.worker.models.families.dense import DENSE
from headrace.engine_proc.worker.models.families.encoders import ENCODERS
from headrace.engine_proc.worker.models.families.gemma import GEMMAS
from headrace.engine_proc.worker.models.families.hybrids import HYBRIDS
from headrace.engine_proc.worker.models.families.latent import LATENT
from headrace.engine_proc.worker.models.families.mamba import MAMBAS
from headrace.engine_proc.worker.models.families.mistral import MISTRALS
from headrace.engine_proc.worker.models.families.mixtures import MIXTURES
from headrace.engine_proc.worker.models.families.ungated import UNGATED
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.errors import ModelError

FAMILIES = DENSE | GEMMAS | MISTRALS | UNGATED | MIXTURES | HYBRIDS | MAMBAS | LATENT | ENCODERS

# Fields of config.json that do not change the logits of a causal decoder.
INERT = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",  # remote code; these families have long been in transformers itself
        "bos_token_id",
        "cache_implementation",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_length",
        "max_sequence_length",
        "model_max_length",
        "model_type",
        "output_router_logits",  # beside the logits; so is the loss of the next
        "pad_token_id",
        "problem_type",  # of a classifier, in training
        "pretraining_tp",  # transformers dropped the code that split by it
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "router_aux_loss_coef",
        "sbert_ce_default_activation_function",  # of a score, as is the next
        "sentence_transformers",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)


def lower_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Lower a Hugging Face `config.json`.

    Raises:
        ModelError: an unknown family, or a known one with a field that is not supported.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"model_type {model_type!r} is not supported by Headrace's own modules")
    return lower_fields(ConfigFields(config, f"a {model_type} model"))


def lower_fields(fields: ConfigFields) -> DecoderSpec:
    """Lower the fields of a config of a known `model_type`."""
    spec = FAMILIES[fields.text("model_type")](fields)
    fields.refuse_unread(INERT)
    return spec
