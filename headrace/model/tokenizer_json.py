"""A model's `tokenizer.json`: the file of that name, or written from what a GGUF file holds.

GGUF stores vocabulary, merges and the *name* of a pre-tokenizer (`tokenizer.ggml.pre`); what the
names mean is fixed by llama.cpp. The result is data: `tokenizers` and `fastokens` both load it.
"""

from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ModelError
from headrace.model.gguf import read_metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
Json = dict[str, Any]


def byte_level(use_regex: bool) -> Json:
    """Return the step that writes bytes as printable characters, GPT-2's splitting before it."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def split(pattern: str) -> list[Json]:
    """Return a split by `pattern`, bytes after it."""
    step = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [step, byte_level(use_regex=False)]


DIGITS = {"type": "Digits", "individual_digits": True}
PRE_TOKENIZERS: dict[str, list[Json]] = {
    "default": [byte_level(use_regex=True)],
    "gpt-2": [byte_level(use_regex=True)],
    "smollm": [DIGITS, byte_level(use_regex=True)],
    "llama-bpe": split(LLAMA3),
    "llama3": split(LLAMA3),
    "qwen2": split(QWEN2),
}


def read_tokenizer_json(path: Path) -> bytes:
    """Return the `tokenizer.json` of a model, a Hugging Face folder or a GGUF file.

    Raises:
        ModelError: there is none, it cannot be read, or it is of a kind that is not known here.
    """
    if path.is_dir():
        file = path / "tokenizer.json"
        try:
            return file.read_bytes()
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    return tokenizer_json(read_metadata(path).metadata, str(path))


def tokenizer_json(metadata: dict[str, Any], path: str) -> bytes:
    """Return the `tokenizer.json` of a GGUF file.

    Raises:
        ModelError: the file has no tokenizer, or one of a kind that is not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        spec = _byte_level_bpe(metadata, path)
    elif kind == "llama":
        spec = _sentencepiece_bpe(metadata, path)
    else:
        raise ModelError(f"{path}: tokenizer.ggml.model is {kind!r}; gpt2 and llama are supported")
    spec |= {"version": "1.0", "truncation": None, "padding": None}
    spec["added_tokens"] = _added_tokens(metadata)
    spec["post_processor"] = _post_processor(metadata)
    return msgspec.json.encode(spec)


def _byte_level_bpe(metadata: dict[str, Any], path: str) -> Json:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{path}: tokenizer.ggml.pre is {pre!r}; {', '.join(PRE_TOKENIZERS)} are supported; "
            "the model's Hugging Face folder, with its tokenizer.json, works instead"
        )
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "decoder": byte_level(use_regex=True),
        "model": _bpe(metadata, [merge.split(" ", 1) for merge in _merges(metadata, path)]),
    }


def _sentencepiece_bpe(metadata: dict[str, Any], path: str) -> Json:
    """SentencePiece joins the pair whose result scores best: merges follow from the scores."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ModelError(f"{path}: tokenizer.ggml.scores is missing")
    known = set(tokens)
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                ranked.append((-score, [token[:cut], token[cut:]]))
    ranked.sort(key=lambda entry: entry[0])
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizers: list[Json] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(metadata, [pair for _, pair in ranked])
    model |= {"byte_fallback": True, "fuse_unk": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _bpe(metadata: dict[str, Any], merges: list[list[str]]) -> Json:
    tokens = metadata["tokenizer.ggml.tokens"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": tokens[unknown] if unknown is not None else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: id for id, token in enumerate(tokens)},
        "merges": merges,
    }


def _merges(metadata: dict[str, Any], path: str) -> list[str]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(f"{path}: tokenizer.ggml.merges is missing")
    return merges


def _added_tokens(metadata: dict[str, Any]) -> list[Json]:
    """Control and user-defined tokens are matched in the text before anything else."""
    types = metadata.get("tokenizer.ggml.token_type") or []
    tokens = metadata["tokenizer.ggml.tokens"]
    return [
        {
            "id": id,
            "content": tokens[id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in (UNKNOWN, CONTROL),
        }
        for id, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _post_processor(metadata: Json) -> Json | None:
    """Return the step that puts BOS and EOS around a prompt, where the file asks for them."""
    sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    sequence: Json = {"Sequence": {"id": "A", "type_id": 0}}
    single, special = [sequence], {}
    for kind, default in (("bos", sentencepiece), ("eos", False)):
        id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if id is None or not metadata.get(f"tokenizer.ggml.add_{kind}_token", default):
            continue
        token = metadata["tokenizer.ggml.tokens"][id]
        step: Json = {"SpecialToken": {"id": token, "type_id": 0}}
        single = [step, *single] if kind == "bos" else [*single, step]
        special[token] = {"id": token, "ids": [id], "tokens": [token]}
    if not special:
        return None
    pair = [sequence, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
