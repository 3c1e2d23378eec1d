"""Opens the draft model that a worker runs beside its model."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype
from headrace.engine_proc.worker.execution.memory_check import (
    GIB,
    adapter_bytes,
    core_bytes,
    step_bytes,
)
from headrace.engine_proc.worker.models.eagle import EAGLE3, open_eagle
from headrace.engine_proc.worker.models.model import DecoderModel, open_model
from headrace.engine_proc.worker.models.mtp import MTP
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.errors import ConfigError, ModelError
from headrace.model.vocabulary import first_difference, read_vocabulary

# Of --speculative, those with a decoder beside the model:
BESIDE = ("draft_model", "self", EAGLE3)
BY_MODELS = (*BESIDE, MTP)


class HeldDecoder(NamedTuple):
    """A decoder to load, and the format in which its weights are held."""

    model: DecoderModel
    dtype: WeightDtype
    has_pages: bool = True  # of its own; else it computes with those of the model
    token_ids: npt.NDArray[np.int64] | None = None  # the model's, of the tokens that EAGLE-3 knows


def open_draft(
    config: ExecutionConfig, model: DecoderModel, dtype: WeightDtype, memory_bytes: int
) -> HeldDecoder | None:
    """Return the draft model, if the flags ask for one beside the model itself.

    Args:
        model: that it drafts for, which is held in `dtype`.

    Raises:
        ModelError: it cannot be opened, or cannot draft for this model.
        ConfigError: both do not fit into the memory.
    """
    if config.speculative not in BESIDE:
        return None
    path = Path(config.draft_model or config.model_path)
    if config.speculative == "self":
        draft = HeldDecoder(model, WeightDtype.INT4, has_pages=False)
    elif config.speculative == EAGLE3:
        layer, token_ids = open_eagle(path, model)
        draft = HeldDecoder(layer, WeightDtype.PACKED, token_ids=token_ids)
    else:
        draft = HeldDecoder(open_model(path, config.load_format), WeightDtype.PACKED)
    spec = draft.model.spec
    if model.pooling is not None or draft.model.pooling is not None:
        raise ModelError(f"{path}: drafts tokens; embedding models have none to draft")
    if spec.state_numbers:
        raise ModelError(
            f"{path}: has recurrent states, which a draft model cannot have; "
            "use --speculative ngram"
        )
    if config.speculative == "draft_model":
        check_vocabulary(Path(config.model_path), path)
    if draft.token_ids is None and spec.max_position < config.max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {spec.max_position} "
            f"positions of the draft model {path}; lower it"
        )
    rounds = config.dtype != "float32"
    taken = draft_bytes(draft, config)
    beside = core_bytes(model.spec, model.weights, dtype, rounds)
    if not draft.has_pages and taken >= beside:
        raise ModelError(
            f"{path}: its weights have 4 bits already, or fewer; --speculative self drafts with "
            "4 bits for a model with more; use --speculative ngram or --draft-model"
        )
    others = bytes_beside(config, model, spec)
    if taken + beside + others > memory_bytes:
        raise ConfigError(
            f"{path}: the draft model's weights take {taken / GIB:.1f} GiB, the model's "
            f"{beside / GIB:.1f} GiB, and steps, adapters and a KV cache that was asked for "
            f"{others / GIB:.1f} GiB, of {memory_bytes / GIB:.1f} GiB of memory; use a smaller one"
        )
    return draft


def bytes_beside(config: ExecutionConfig, model: DecoderModel, draft: DecoderSpec) -> int:
    """Return what a model and its draft model take beside weights.

    EAGLE-3's layer, and the hidden states that are joined for it, are whole in each worker.
    """
    num_tokens, is_eagle = config.max_num_batched_tokens, config.speculative == EAGLE3
    own = step_bytes(model.spec, num_tokens)
    joined = step_bytes(model.spec, num_tokens, is_drafted=is_eagle) - own
    drafts = (config.tp if is_eagle else 1) * (step_bytes(draft, num_tokens) + joined)
    cache = config.kv_cache_memory_bytes or 0
    adapters = adapter_bytes(config, model.spec, model.weights)
    return own + drafts + cache + adapters


def draft_bytes(draft: HeldDecoder, config: ExecutionConfig) -> int:
    """Return what a draft model's weights take; EAGLE-3's layer is whole in each worker."""
    model, copies = draft.model, 1 if draft.token_ids is None else config.tp
    return copies * core_bytes(model.spec, model.weights, draft.dtype, config.dtype != "float32")


def check_vocabulary(model: Path, draft: Path) -> None:
    """Raise `ModelError` where a token of one model is another token of the other."""
    tokens, drafted = read_vocabulary(model), read_vocabulary(draft)
    id = first_difference(tokens, drafted)
    if id is not None:
        raise ModelError(
            f"{draft}: its token {id} is {drafted.get(id)!r}, and {tokens.get(id)!r} in {model}; "
            "a draft model needs the model's vocabulary"
        )
