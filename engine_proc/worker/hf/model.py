"""Opens a folder as transformers' own modules, for models that no `DecoderSpec` expresses."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headrace.engine_proc.worker.checkpoints.safetensors import check_folder
from headrace.engine_proc.worker.hf.hook import HOOKED, AttentionLayer, probe
from headrace.errors import ModelError
from headrace.model.pooling import Pooling
from headrace.model.vision_families import FAMILIES
from headrace.system.machine import usable_cores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# RoPE whose frequencies follow the longest sequence of a batch, once that is past a length.
FOLLOWING_LENGTH = ("dynamic", "longrope")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransformersModel:
    """A model in memory, its attention hooked."""

    module: PreTrainedModel
    layers: Mapping[nn.Module, AttentionLayer]
    pooling: Pooling | None  # of an embedding model, which has no head; None generates

    @property
    def architecture(self) -> str:
        """The class that runs, for messages."""
        return type(self.module).__name__

    @property
    def dtype(self) -> str:
        """The key of `DTYPES` that it computes in."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.module.dtype)

    @property
    def is_causal(self) -> bool:
        """Whether no token sees those after it."""
        return all(layer.reach.after == 0 for layer in self.layers.values())

    @property
    def vocab_size(self) -> int:
        """Number of tokens with logits."""
        size: int = self.module.config.get_text_config().vocab_size
        return size

    def page_bytes(self, page_tokens: int, kv_dtype: str) -> int:
        """Size of a page's keys and values in `kv_dtype`, one of `DTYPES`, bytes."""
        numbers = [
            layer.kv_heads * (layer.head_dim + layer.value_dim) for layer in self.layers.values()
        ]
        return DTYPES[kv_dtype].itemsize * page_tokens * sum(numbers)


def open_transformers(
    folder: Path,
    *,
    dtype: str,
    max_model_len: int,
    pooling: Pooling | None = None,
    num_ranks: int = 1,
    is_dummy: bool = False,
    device: str = "cpu",
) -> TransformersModel:
    """Load the model of a folder, without running code from it.

    Args:
        dtype: a key of `DTYPES`, or `auto` for that of the files.
        max_model_len: the longest sequence it will be given, in tokens.
        pooling: of an embedding model, which is loaded without its head.
        num_ranks: workers that compute at the same time.
        is_dummy: make weights up; the folder needs no files of weights.
    Raises:
        ModelError: files are missing, broken or inconsistent, or the model's attention needs more
            than paged keys and values.
    """
    if not is_dummy:
        check_folder(folder)
    config = open_config(folder, num_ranks)
    refuse_by_config(config, max_model_len, head=pooling is None)
    kind: Any = transformers.AutoModelForCausalLM if pooling is None else transformers.AutoModel
    if is_dummy:
        module = random_module(config, dtype, kind, HOOKED)
    else:
        module = load_module(folder, config, dtype, kind, HOOKED)
    module = on_device(module, device)
    layers = probe(module, max_model_len)
    refuse_by_layers(module, layers)
    model = TransformersModel(module, layers, pooling)
    if pooling is None and not model.is_causal:
        raise ModelError(f"{model.architecture} sees tokens to come, so it cannot generate")
    return model


def open_config(folder: Path, num_ranks: int = 1) -> PreTrainedConfig:
    """Read a folder's config, and make torch and transformers fit to serve."""
    # All cores: by `SPIN_COUNT`, threads that wait for long leave theirs to the rest of the ring.
    torch.set_num_threads(max(1, usable_cores() // num_ranks))
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    return config


def refuse_by_config(config: PreTrainedConfig, max_model_len: int, head: bool) -> None:
    """Refuse models that the config alone rules out, before weights are loaded."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(f"a {kind} model is an encoder and a decoder, which is not supported")
    classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING if head else transformers.MODEL_MAPPING
    if type(config) not in classes:
        if hasattr(config, "vision_config"):
            raise ModelError(
                f"a {kind} model takes images; those that are supported are {', '.join(FAMILIES)}, "
                "in our own code (--model-impl)"
            )
        raise ModelError(f"a {kind} model does not generate text")
    if classes[type(config)]._is_stateful:
        raise ModelError(
            f"a {kind} model has state-space, recurrent or linear-attention layers, which are not "
            "supported"
        )
    text = config.get_text_config()
    for rope in rope_tables(getattr(text, "rope_parameters", None) or {}):
        limit = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if rope.get("rope_type") in FOLLOWING_LENGTH and max_model_len > limit:
            raise ModelError(
                f"{rope['rope_type']!r} RoPE depends on the longest sequence of a batch beyond "
                f"{limit} tokens; serve it with --max-model-len {limit} or less"
            )


def rope_tables(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the one table of RoPE parameters, or those of each kind of layer."""
    nested: list[Mapping[str, Any]] = [t for t in parameters.values() if isinstance(t, dict)]
    return nested or [parameters]


def load_module(
    folder: Path, config: PreTrainedConfig, dtype: str, auto_class: Any, attention: str | None
) -> PreTrainedModel:
    """Load the weights; refuse files that lack some, or have them in other shapes."""
    module, report = auto_class.from_pretrained(
        folder,
        config=config,
        dtype=DTYPES.get(dtype, "auto"),
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # and report them, as all of these
        output_loading_info=True,
    )
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"tensor {name!r} has shape {list(stored)}, but a {config.model_type} model of this "
            f"config has {list(wanted)}"
        )
    for name in sorted(report["missing_keys"]):
        if name.startswith("pooler."):  # BERT's, of which sentence vectors make no use
            continue
        raise ModelError(f"tensor {name!r} is missing")
    for name in sorted(report["unexpected_keys"]):
        log.warning(
            "%s: tensor %r and %d others are not part of %s and are ignored",
            folder,
            name,
            len(report["unexpected_keys"]) - 1,
            type(module).__name__,
        )
        break
    loaded: PreTrainedModel = module.eval()
    return loaded


def random_module(
    config: PreTrainedConfig, dtype: str, auto_class: Any, attention: str
) -> PreTrainedModel:
    """Make a model with the random weights that its class begins training with."""
    stored = getattr(config, "dtype", None) or torch.bfloat16
    torch.manual_seed(0)  # all workers have parts of the same
    module = auto_class.from_config(
        config, dtype=DTYPES.get(dtype, stored), attn_implementation=attention
    )
    made: PreTrainedModel = module.eval()
    return made


def on_device(module: PreTrainedModel, device: str) -> PreTrainedModel:
    """Move a model to a device of torch's. On processors float16 is slow, and becomes fp32."""
    if device == "cpu" and module.dtype == torch.float16:
        module = module.to(torch.float32)  # type: ignore[arg-type]
    moved: PreTrainedModel = module.to(device)  # type: ignore[arg-type]
    return moved


def refuse_by_layers(module: PreTrainedModel, layers: Mapping[nn.Module, AttentionLayer]) -> None:
    """Refuse a model that carries anything from token to token except keys and values."""
    num_layers = module.config.get_text_config().num_hidden_layers
    if len(layers) != num_layers:
        raise ModelError(
            f"{len(layers)} of the {num_layers} layers of {type(module).__name__} use "
            "transformers' attention interface; state-space, recurrent and linear-attention "
            "layers, ALiBi and attention of a model's own are not supported"
        )
