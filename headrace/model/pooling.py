"""Pooling of an embedding model, by its sentence-transformers files.

`modules.json` lists the steps after the transformer; `1_Pooling/config.json` is the one that
pools. Dense modules behind it multiply the vector. A folder without `modules.json` holds an
embedding model only if it is an encoder, and is then pooled by the mean, as sentence-transformers
does. A cross-encoder compares two texts by reading both. It has a head with one label, or scores by
the logits of tokens behind a prompt (`LogitScore`, or fields of its config).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import BAD_JSON, ModelError
from headrace.model.vocabulary import read_vocabulary


class PoolingKind(StrEnum):
    """The tokens whose hidden states become the vector."""

    MEAN = "mean"
    FIRST = "cls"
    LAST = "lasttoken"


class DenseActivation(StrEnum):
    """The activation behind a product with a vector."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"


SCORE_ACTIVATIONS = (DenseActivation.SIGMOID, DenseActivation.IDENTITY)
# Fields of a config that names the tokens whose logits score, and values of METHOD.
TOKENS, METHOD, QWEN3_RERANKER = "classifier_from_token", "method", "is_original_qwen3_reranker"
TOKEN_FIELDS = (TOKENS, METHOD, QWEN3_RERANKER)
SOFTMAX, PLAIN = "from_2_way_softmax", "no_post_processing"


# How files before sentence-transformers 6 named them, one flag each.
OLDER_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# The model types, in config.json, of models that can do nothing but embed.
ENCODERS = ("bert", "camembert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")
# Those that count positions from the padding token's id + 1 on.
LATE_POSITIONS = ("camembert", "roberta", "xlm-roberta")


@dataclass(frozen=True)
class DenseModule:
    """A product with the matrix of `model.safetensors` in the folder `path`."""

    path: str
    out_features: int
    activation: DenseActivation


@dataclass(frozen=True)
class Pooling:
    """The pooling steps on the hidden states of a text's tokens."""

    kind: PoolingKind
    normalize: bool = False  # to length 1, after all
    max_tokens: int | None = None  # of a text, special tokens included; None is not known
    dense: tuple[DenseModule, ...] = ()
    scores: bool = False  # a head makes one number of the vector: how alike two texts are
    # In place of a head: the token whose logit is the score, and one whose logit is taken off.
    score_tokens: tuple[int, ...] = ()
    activation: DenseActivation = DenseActivation.IDENTITY  # of that number
    # What is written before a text, by the name of its kind in sentence-transformers' config. Empty
    # where pooling leaves the tokens of prompts out (`include_prompt`).
    prompts: dict[str, str] = field(default_factory=dict)


class Module(msgspec.Struct):
    """One step of `modules.json`; its files are in the folder `path`."""

    type: str
    path: str = ""


def read_pooling(folder: Path, config: Mapping[str, Any]) -> Pooling | None:
    """Read how a folder's model is pooled; None if it generates.

    Raises:
        ModelError: a file is broken, or asks for a step that is not supported.
    """
    if is_token_classifier(config):
        return read_tokens(folder, config)
    if is_classifier(folder, config):
        return read_head(folder, config)
    if not (folder / "modules.json").exists():
        if config.get("model_type") not in ENCODERS:
            return None
        return Pooling(PoolingKind.MEAN, max_tokens=read_max_tokens(folder, config))
    return read_modules(folder, config)


def read_modules(folder: Path, config: Mapping[str, Any]) -> Pooling:
    """Read what `modules.json` lists."""
    modules: list[Module] = read(folder / "modules.json", list[Module])
    if [module.type.rsplit(".", 1)[-1] for module in modules] == ["Transformer", "LogitScore"]:
        return read_logit_score(folder, modules[1].path, config)
    kind, normalize, prompts = PoolingKind.MEAN, False, read_prompts(folder)
    dense: list[DenseModule] = []
    for module in modules:
        match module.type.rsplit(".", 1)[-1]:
            case "Transformer":
                pass
            case "Pooling":
                file = folder / module.path / "config.json"
                kind = read_kind(file)
                prompts = prompts if read(file, dict[str, Any]).get("include_prompt", True) else {}
            case "Dense" if not normalize:
                dense.append(read_dense(folder, module.path))
            case "Normalize":
                normalize = True
            case other:
                raise ModelError(
                    f"{folder / 'modules.json'}: a {other} module is not supported"
                    f"{' behind Normalize' if normalize else ''}; Transformer, Pooling, Dense and "
                    "at last Normalize are"
                )
    return Pooling(kind, normalize, read_max_tokens(folder, config), tuple(dense), prompts=prompts)


def read_prompts(folder: Path) -> dict[str, str]:
    """Read the prompts of `config_sentence_transformers.json`, by lower-case names."""
    path = folder / "config_sentence_transformers.json"
    prompts = read_optional(path).get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(p, str | None) for p in prompts.values()
    ):
        raise ModelError(f"{path}: prompts are {prompts!r:.40}, not texts by name")
    return {name.lower(): prompt or "" for name, prompt in prompts.items()}


def read_logit_score(folder: Path, path: str, config: Mapping[str, Any]) -> Pooling:
    """Read which tokens' logits score, by the module in the folder `path`."""
    file = folder / path / "config.json"
    found: dict[str, Any] = read(file, dict[str, Any])
    names = ("true_token_id", "false_token_id")
    tokens = tuple(found[name] for name in names if found.get(name) is not None)
    if found.get(names[0]) is None or not all(isinstance(t, int) and t >= 0 for t in tokens):
        raise ModelError(f"{file}: {names[0]} and {names[1]} must be tokens, not {list(tokens)}")
    return scored_by(tokens, folder, config)


def is_token_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config names tokens to score by, as vLLM has it; `--hf-overrides` may bring it."""
    return config.get(TOKENS) is not None or bool(config.get(QWEN3_RERANKER))


def score_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the token whose logit is the score, and that whose logit is taken off, if any.

    Behind a sigmoid, the difference of two is the share of the second in a softmax.

    Raises:
        ModelError: the fields do not fit each other, or a token is not one of the vocabulary.
    """
    tokens = config.get(TOKENS)
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f'{folder}: {TOKENS} is {tokens!r:.40}, not tokens such as ["no", "yes"]')
    method = SOFTMAX if config.get(QWEN3_RERANKER) else config.get(METHOD)
    if (method, len(tokens)) not in ((SOFTMAX, 2), (PLAIN, 1)):
        raise ModelError(
            f"{folder}: {METHOD} {method!r} with {len(tokens)} tokens of {TOKENS} is not "
            f"supported; {SOFTMAX} takes two, {PLAIN} takes one"
        )
    ids = {token: id for id, token in read_vocabulary(folder).items()}
    for token in tokens:
        if token not in ids:
            raise ModelError(
                f"{folder}: {token!r} of {TOKENS} is not one token of the vocabulary; name tokens "
                "as tokenizer.json spells them"
            )
    return tuple(ids[token] for token in reversed(tokens))


def read_tokens(folder: Path, config: Mapping[str, Any]) -> Pooling:
    """Read which tokens' logits score, by the config itself."""
    if config.get("model_type") in ENCODERS:
        raise ModelError(f"{folder}: an encoder has no logits of tokens to score by")
    return scored_by(score_tokens(folder, config), folder, config)


def scored_by(tokens: tuple[int, ...], folder: Path, config: Mapping[str, Any]) -> Pooling:
    """Return the pooling of a decoder that scores by the logits of tokens."""
    return Pooling(
        PoolingKind.LAST,
        max_tokens=read_max_tokens(folder, config),
        scores=True,
        score_tokens=tokens,
        activation=read_activation(folder, config),
    )


def read_dense(folder: Path, path: str) -> DenseModule:
    """Read the config of a Dense module, which is in the folder `path`."""
    file = folder / path / "config.json"
    config: dict[str, Any] = read(file, dict[str, Any])
    name = str(config.get("activation_function", "Tanh")).rsplit(".", 1)[-1].lower()
    size = config.get("out_features")
    if name not in tuple(DenseActivation):
        known = ", ".join(DenseActivation)
        raise ModelError(f"{file}: activation {name} is not supported; one of {known} is")
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"{file}: out_features is {size}, not a positive integer")
    if config.get("use_residual"):
        raise ModelError(f"{file}: use_residual is not supported")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ModelError(f"{file}: {key} is {config[key]}, not sentence_embedding")
    return DenseModule(path, size, DenseActivation(name))


def is_classifier(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a head that classifies is part of a model, and is to be used."""
    if not str(config.get("architectures")).endswith("ForSequenceClassification']"):
        return False
    task = read_optional(folder / "sentence_bert_config.json").get("transformer_task")
    return task == "sequence-classification" or not (folder / "modules.json").exists()


def read_head(folder: Path, config: Mapping[str, Any]) -> Pooling:
    """Read how a cross-encoder scores."""
    path = folder / "config.json"
    num_labels = len(config.get("id2label") or range(2))
    if num_labels != 1:
        raise ModelError(
            f"{path}: a classifier of {num_labels} labels is not supported; a cross-encoder has one"
        )
    return Pooling(
        pooled_by_head(config),
        max_tokens=read_max_tokens(folder, config),
        scores=True,
        activation=read_activation(folder, config),
    )


def pooled_by_head(config: Mapping[str, Any]) -> PoolingKind:
    """Return which tokens a classification head reads: of a decoder the last."""
    if config.get("model_type") not in ENCODERS:
        return PoolingKind.LAST
    is_mean = config.get("classifier_pooling") == "mean"  # ModernBERT's
    return PoolingKind.MEAN if is_mean else PoolingKind.FIRST


def read_activation(folder: Path, config: Mapping[str, Any]) -> DenseActivation:
    """Read a cross-encoder's activation; older files have it in other places."""
    nested = config.get("sentence_transformers") or {}
    stated = (
        read_optional(folder / "config_sentence_transformers.json").get("activation_fn")
        or nested.get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
        or DenseActivation.SIGMOID
    )
    name = stated.rsplit(".", 1)[-1].lower()
    if name not in SCORE_ACTIVATIONS:
        known = ", ".join(SCORE_ACTIVATIONS)
        raise ModelError(f"{folder}: activation {stated} is not supported; one of {known} is")
    return DenseActivation(name)


def read_kind(path: Path) -> PoolingKind:
    """Read `1_Pooling/config.json`."""
    config: dict[str, Any] = read(path, dict[str, Any])
    on = [name for flag, name in OLDER_FLAGS.items() if config.get(flag)] or ["mean"]
    kinds = config.get("pooling_mode", on)
    kinds = kinds if isinstance(kinds, list) else [kinds]
    supported = ", ".join(PoolingKind)
    if len(kinds) != 1 or kinds[0] not in tuple(PoolingKind):
        raise ModelError(f"{path}: pooling by {kinds} is not supported; one of {supported} is")
    return PoolingKind(kinds[0])


def read_max_tokens(folder: Path, config: Mapping[str, Any]) -> int | None:
    """Read the maximum length of a text: the files' value, within the number of positions."""
    path = folder / "sentence_bert_config.json"
    settings = read_optional(path)
    if settings.get("do_lower_case"):
        raise ModelError(f"{path}: do_lower_case is not supported; only the tokenizer's is")
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and config.get("model_type") in LATE_POSITIONS:
        positions -= config.get("pad_token_id", 1) + 1
    stated = settings.get("max_seq_length")
    if stated is None:
        stated = read_optional(folder / "tokenizer_config.json").get("model_max_length")
    limits = [limit for limit in (positions, stated) if isinstance(limit, int | float)]
    return int(min(limits)) if limits else None


def read_optional(path: Path) -> dict[str, Any]:
    """Read a JSON object, empty if there is no such file."""
    settings: dict[str, Any] = read(path, dict[str, Any]) if path.exists() else {}
    return settings


def read(path: Path, kind: Any) -> Any:
    """Read a JSON file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *BAD_JSON) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
