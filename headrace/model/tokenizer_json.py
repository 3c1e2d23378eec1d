"""A model's `tokenizer.json`: the file of that name, or written from another tokenizer file.

GGUF stores vocabulary, merges and the *name* of a pre-tokenizer (`tokenizer.ggml.pre`); what the
names mean is fixed by llama.cpp. The result is data: `tokenizers` and `fastokens` both load it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import BAD_JSON, ModelError
from headrace.model.gguf import read_metadata
from headrace.model.gguf_metadata import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    GgufVocabulary,
)
from headrace.model.mistral_tokenizer import (
    find_mistral_tokenizer,
    is_mistral_tokenizer,
    read_mistral_vocabulary,
)
from headrace.model.pre_tokenizers import PRE_TOKENIZERS, Json, PreTokenizer, byte_level, split
from headrace.model.string_array import StringArray

# BPE without bytes as characters, and whether BOS is always added.
UTF8_BPE = {"gemma4": True, "granite-embed-multi-311m": True, "sarvam-moe": False}
A_FOLDER_WORKS = "the model's Hugging Face folder, with its tokenizer.json, works instead"
KEYS = "tokenizer.ggml."


def read_tokenizer_json(path: Path) -> bytes:
    """Return the `tokenizer.json` of a model, a folder or a GGUF file, or of a tokenizer file.

    Raises:
        ModelError: there is none, it cannot be read, or it is of a kind that is not known here.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        return msgspec.json.encode(read_tokenizer_spec(path))
    try:
        return file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None


def read_tokenizer_spec(path: Path) -> Json:
    """Return the content of a model's `tokenizer.json`, that of another file without encoding it.

    Raises:
        ModelError: as `read_tokenizer_json`, or the file is not JSON.
    """
    if (path / "tokenizer.json").exists():
        try:
            return msgspec.json.decode(read_tokenizer_json(path), type=dict[str, Any])
        except BAD_JSON as error:
            raise ModelError(f"{path / 'tokenizer.json'}: not a JSON object: {error}") from None
    if path.is_dir():
        file = find_mistral_tokenizer(path)
        if file is None:
            raise ModelError(f"{path / 'tokenizer.json'}: no such file; a model folder needs it")
        return spec_of_mistral(file)
    if is_mistral_tokenizer(path):
        return spec_of_mistral(path)
    return spec_of(read_metadata(path).metadata, str(path))


def spec_of_mistral(path: Path) -> Json:
    """Return the content of a `tokenizer.json` for a file that mistral-common reads."""
    vocabulary, pre = read_mistral_vocabulary(path)
    model = _sentencepiece_bpe(vocabulary) if pre is None else _byte_level_bpe(vocabulary, pre)
    return _whole(model, vocabulary, adds_bos=True)


def tokenizer_json(metadata: Mapping[str, object], path: str) -> bytes:
    """Return the `tokenizer.json` of a GGUF file; raises as `spec_of` does."""
    return msgspec.json.encode(spec_of(metadata, path))


def spec_of(metadata: Mapping[str, object], path: str) -> Json:
    """Return the content of a GGUF file's `tokenizer.json`.

    Raises:
        ModelError: the file has no tokenizer, or one of a kind that is not known here.
    """
    fields = {
        key.removeprefix(KEYS): list(value) if isinstance(value, StringArray) else value
        for key, value in metadata.items()
    }
    try:
        return _spec(_vocabulary(fields))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _vocabulary(fields: Mapping[str, object]) -> GgufVocabulary:
    """Read the metadata, and check that every number of it is within its bounds."""
    try:
        vocabulary = msgspec.convert(fields, GgufVocabulary)
    except msgspec.ValidationError as error:
        raise ModelError(f"its {KEYS}* cannot be used: {error}") from None
    size = len(vocabulary.tokens)
    for name, values in (
        ("scores", vocabulary.scores),
        ("token_type", vocabulary.token_type or None),
    ):
        if values is not None and len(values) != size:
            raise ModelError(f"{KEYS}{name} has {len(values)} entries for {size} tokens")
    for name in ("bos_token_id", "eos_token_id", "unknown_token_id"):
        id = getattr(vocabulary, name)
        if id is not None and not 0 <= id < size:
            setattr(vocabulary, name, None)  # -1, or padding that was never stored
    return vocabulary


def _spec(vocabulary: GgufVocabulary) -> Json:
    pre, adds_bos = vocabulary.pre, True
    if vocabulary.model == "gemma4" or (vocabulary.model == "gpt2" and pre in UTF8_BPE):
        spec = _utf8_bpe(vocabulary)
        adds_bos = UTF8_BPE.get(pre, True)
        if adds_bos:
            vocabulary.add_bos_token = None  # early files say False
    elif vocabulary.model == "gpt2":
        if pre not in PRE_TOKENIZERS:
            raise ModelError(
                f"{KEYS}pre is {pre!r:.40}, none of the {len(PRE_TOKENIZERS) + len(UTF8_BPE)} "
                f"names that are known; {A_FOLDER_WORKS}"
            )
        spec = _byte_level_bpe(vocabulary, PRE_TOKENIZERS[pre])
        adds_bos = PRE_TOKENIZERS[pre].add_bos
    elif vocabulary.model == "llama":
        spec = _sentencepiece_bpe(vocabulary)
    else:
        raise ModelError(
            f"{KEYS}model is {vocabulary.model!r:.40}; gpt2, gemma4 and llama are supported; "
            f"{A_FOLDER_WORKS}"
        )
    if vocabulary.add_bos_token is not None:
        adds_bos = vocabulary.add_bos_token
    return _whole(spec, vocabulary, adds_bos)


def _whole(spec: Json, vocabulary: GgufVocabulary, adds_bos: bool) -> Json:
    """Return a `tokenizer.json` with the tokens that are matched first, and those around texts."""
    return spec | {
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _post_processor(vocabulary, adds_bos),
        "version": "1.0",
        "truncation": None,
        "padding": None,
    }


def _byte_level_bpe(vocabulary: GgufVocabulary, pre: PreTokenizer) -> Json:
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.steps()},
        "decoder": byte_level(use_regex=True),
        "model": _bpe(vocabulary, _merges(vocabulary)) | {"ignore_merges": pre.ignore_merges},
    }


def _utf8_bpe(vocabulary: GgufVocabulary) -> Json:
    """Merges in SentencePiece's spelling, on the characters of a line."""
    spec = _spelled_with_bars(_bpe(vocabulary, _merges(vocabulary)), prefix=False)
    return spec | {"pre_tokenizer": split(r"[^\n]+|\n+")}


def _sentencepiece_bpe(vocabulary: GgufVocabulary) -> Json:
    model = _bpe(vocabulary, _merges_by_score(vocabulary))
    return _spelled_with_bars(model, prefix=vocabulary.add_space_prefix)


def _merges_by_score(vocabulary: GgufVocabulary) -> list[list[str]]:
    """Return the pairs to merge where the pair is joined whose result scores best.

    Of pairs with the same result the leftmost is. A list of merges has that if the pair whose first
    half is longest stands first: of `an`, `a`, `na` the first two become `ana`.
    """
    tokens, scores = vocabulary.tokens, vocabulary.scores
    if scores is None:
        raise ModelError(f"{KEYS}scores is missing")
    known = set(tokens)
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in known and token[cut:] in known:
                ranked.append((-score, [token[:cut], token[cut:]]))
    ranked.sort(key=lambda entry: entry[0])
    return [pair for _, pair in ranked]


def _spelled_with_bars(model: Json, *, prefix: bool) -> Json:
    """Return a tokenizer with bars for spaces, and a token per byte of what the model lacks."""
    normalizers: list[Json] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model | {"byte_fallback": True, "fuse_unk": True},
    }


def _bpe(vocabulary: GgufVocabulary, merges: list[str] | list[list[str]]) -> Json:
    tokens, unknown = vocabulary.tokens, vocabulary.unknown_token_id
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


def _merges(vocabulary: GgufVocabulary) -> list[str] | list[list[str]]:
    """Return the pairs to merge, first ones first, with a space between the two.

    One that starts with #version would be read as a comment: then they are parted here.
    """
    merges = vocabulary.merges
    if merges is None and vocabulary.scores is not None:
        return _merges_by_score(vocabulary)
    if merges is None:
        raise ModelError(f"{KEYS}merges is missing")
    if any(merge.startswith("#version") for merge in merges):
        return [merge.split(" ", 1) for merge in merges]
    return merges  # half a million lists take a second


def _added_tokens(vocabulary: GgufVocabulary) -> list[Json]:
    """Control and user-defined tokens are matched in the text before anything else.

    Those of Phi-3 take the spaces after them, as llama.cpp does for a model of that name.
    """
    typed = zip(vocabulary.tokens, vocabulary.token_type, strict=False)  # or no types at all
    is_phi3 = any(name in vocabulary.model_name.lower() for name in ("phi-3", "phi3"))
    return [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
            "normalized": False,
            "special": kind in (UNKNOWN, CONTROL),
        }
        for id, (token, kind) in enumerate(typed)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _post_processor(vocabulary: GgufVocabulary, adds_bos: bool) -> Json | None:
    """Return the step that puts BOS and EOS around a prompt, where the file asks for them."""
    bos = [vocabulary.bos_token_id] if adds_bos else []
    eos = [vocabulary.eos_token_id] if vocabulary.add_eos_token else []
    special: Json = {}
    around: list[list[Json]] = [[], []]
    for steps, ids in zip(around, (bos, eos), strict=True):
        for id in ids:
            if id is not None:
                token = vocabulary.tokens[id]
                steps.append({"SpecialToken": {"id": token, "type_id": 0}})
                special[token] = {"id": token, "ids": [id], "tokens": [token]}
    if not special:
        return None
    sequence: Json = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*around[0], sequence, *around[1]]
    pair = [sequence, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
