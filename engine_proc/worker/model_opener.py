"""Opens a model for Headrace's own executors, or else for transformers' modules.

Torch is imported only for the latter.
"""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import extras
from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.collectives.collectives import CollectiveFailed
from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.device_selection import NAMES, is_interpreted, place_modules
from headrace.engine_proc.worker.models.model import (
    NO_DUMMY,
    DecoderModel,
    NotLowered,
    open_model,
    read_json,
)
from headrace.engine_proc.worker.models.mtp import MTP
from headrace.errors import ModelError, in_a_line
from headrace.model.config_json import FLAG
from headrace.model.pooling import PoolingKind, read_pooling

if TYPE_CHECKING:
    from headrace.engine_proc.worker.hf.classifier import Classifier
    from headrace.engine_proc.worker.hf.model import TransformersModel

CANNOT_RUN = "transformers cannot run it"

log = logging.getLogger(__name__)


def open_for(
    config: ExecutionConfig, group: ShmAllReduce | None = None
) -> "DecoderModel | TransformersModel | Classifier":
    """Open a model for `--model-impl`.

    One of a group has a share of a model that runs in transformers; others come whole.

    Raises:
        ModelError: it cannot be opened that way; where both ways were tried, the text has both
            reasons.
        ConfigError: torch or transformers is missing.
    """
    path, impl = Path(config.model_path), config.model_impl
    if impl == "transformers":
        return open_in_modules(config, group)
    try:
        model = open_model(
            path,
            config.load_format,
            drafts=config.speculative == MTP,
            hf_overrides=config.hf_overrides,
        )
    except NotLowered as lowering:
        if impl == "headrace" or config.hf_overrides is not None:
            raise
        extras.require("modules", f"{lowering}; transformers may run it")
        try:
            opened = open_in_modules(config, group)
        except ModelError as error:
            reason = str(error).removeprefix(f"{path}: ").removeprefix(f"{CANNOT_RUN}: ")
            raise ModelError(f"{lowering}; nor can transformers run it: {reason}") from error
        log.info("%s; transformers' modules run it, slower", lowering)
        return opened
    if model.spec.encoder is not None:
        if group is not None:
            raise ModelError(f"{path}: an encoder is run by one worker; use --tp 1")
    elif model.pooling is not None and model.pooling.kind != PoolingKind.LAST:
        raise wrong_pooling(path, model.pooling.kind)
    return model


def open_in_modules(
    config: ExecutionConfig, group: ShmAllReduce | None
) -> "TransformersModel | Classifier":
    """Open a model for transformers' modules, with its head if that scores.

    Raises:
        ModelError: it cannot be opened that way.
        ConfigError: torch or transformers is missing.
    """
    path = Path(config.model_path)
    if config.hf_overrides is not None:
        raise ModelError(f"{path}: runs in transformers, which takes no {FLAG}; leave it out")
    pooling = read_pooling(path, read_json(path / "config.json")) if path.is_dir() else None
    if pooling is None or not pooling.scores:
        return open_with_transformers(config, group)
    if group is not None:
        raise ModelError(f"{path}: a cross-encoder is run by one worker; use --tp 1")
    if pooling.score_tokens:
        raise ModelError(f"{path}: only our own code scores by logits of tokens")
    if config.load_format == "dummy":
        raise ModelError(NO_DUMMY.format(path=path))
    extras.require("modules", f"{path}: runs in transformers")
    from headrace.engine_proc.worker.hf.classifier import open_classifier

    return open_classifier(
        path, dtype=config.dtype, activation=pooling.activation, device=modules_device(config)
    )


def open_with_transformers(
    config: ExecutionConfig, group: ShmAllReduce | None
) -> "TransformersModel":
    """Open a folder with transformers, and check that we run it as transformers does.

    Raises:
        ModelError: it cannot be opened, or differs.
        ConfigError: torch or transformers is missing.
        CollectiveFailed: another worker is lost.
    """
    path, max_model_len = Path(config.model_path), config.max_model_len
    if not path.is_dir():
        raise ModelError(f"{path}: only folders can be run with --model-impl transformers")
    extras.require("modules", f"{path}: runs in transformers")
    from headrace.engine_proc.worker.hf.check import check
    from headrace.engine_proc.worker.hf.model import open_transformers
    from headrace.engine_proc.worker.hf.shard import take_share

    pooling = read_pooling(path, read_json(path / "config.json"))
    device = modules_device(config)
    try:
        model = open_transformers(
            path,
            dtype=config.dtype,
            max_model_len=max_model_len,
            pooling=pooling,
            num_ranks=1 if group is None else group.num_ranks,
            is_dummy=config.load_format == "dummy",
            device=device,
        )
        if group is None:
            check(model)
        else:
            model = check(model, partial(take_share, group=group, max_model_len=max_model_len))
    except ModelError as error:
        text = str(error).removeprefix(f"{path}: ")
        raise ModelError(f"{path}: {text}") from error
    except CollectiveFailed:
        raise
    except Exception as error:  # whatever transformers and the model's code raise
        raise ModelError(f"{path}: {CANNOT_RUN}: {reason_of(error)}") from error
    if pooling is not None and model.is_causal and pooling.kind != PoolingKind.LAST:
        raise wrong_pooling(path, pooling.kind)
    return model


def modules_device(config: ExecutionConfig) -> str:
    """Return torch's name of the device of transformers' modules.

    Raises:
        ModelError, ConfigError: the flags ask for another, or for what it cannot do.
    """
    device = place_modules(config)
    if device.name == "cuda":
        log.info("transformers' modules run on %s: %s", NAMES[device.name], device.why)
    return "cpu" if is_interpreted() else device.name


def reason_of(error: Exception) -> str:
    """Return in one line why transformers cannot run a model."""
    if isinstance(error, KeyError):  # a model that looks its attention up in a table of its own
        return f"it does not know {error}; its attention is of its own kind"
    return in_a_line(error)


def wrong_pooling(path: Path, kind: PoolingKind) -> ModelError:
    """The error for a decoder whose vectors are not those of its last tokens."""
    return ModelError(f"{path}: pools a decoder by {kind}; only by its last token it can be done")
