"""Models with added tokens, special ones and others, and no weights: Qwen-like and Gemma-like."""

import functools
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from headrace.config.model_card import find_demo_model, read_gguf
from headrace.model.grammar_compiler import GrammarCompiler
from headrace.model.pre_tokenizers import PRE_TOKENIZERS
from headrace.model.pre_tokenizers import byte_level as bytes_step
from headrace.model.token_table import (
    SENTENCE_PIECE,
    STRIP,
    TokenTable,
    byte_characters,
    read_table,
)
from headrace.model.tokenizer_json import read_tokenizer_json

ENDS = ["<|im_end|>", "<|endoftext|>"]
DEEPSEEK = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"]
DEEPSEEK += ["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[THINK]"]
MARKS += ["[/THINK]", *DEEPSEEK]
HTML = ["<h1>", "</h1>", "<td>", "\n\n", "é"]
QWEN_GGUF = os.environ.get("QWEN_GGUF", "")  # a real model's file, where there is one


class Model(NamedTuple):
    """The parts of a model that grammars need."""

    compiler: GrammarCompiler
    tokenizer: Tokenizer
    table: TokenTable
    ends: list[int]
    special: dict[str, int]
    spelled: dict[bytes, set[int]]  # the tokens of some bytes

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text that the tokenizer makes of it, without a space before."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if ids and self.table.token_bytes[ids[0]] == b" " and not text.startswith(" "):
            return ids[1:]
        return ids

    def bytes_of(self, data: bytes) -> list[int]:
        """Return a token for each byte, or character."""
        return [min(self.spelled[bytes([byte])]) for byte in data]

    def begins(self, data: bytes) -> set[int]:
        """Return the tokens of which a text may begin with one."""
        found = (self.spelled.get(data[:end], set()) for end in range(1, len(data) + 1))
        return set().union(*found)


def added(tokens: list[str], first: int, special: bool) -> list[dict[str, Any]]:
    """Return entries of `added_tokens`."""
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return [
        {"id": first + i, "content": token, "special": special} | dict.fromkeys(names, False)
        for i, token in enumerate(tokens)
    ]


def byte_level() -> dict[str, Any]:
    """Return a tokenizer like Qwen's: bytes, after NFC, and added tokens behind the vocabulary."""
    merges = [["t", "o"], ["o", "l"], ["to", "ol"], ["<", "t"], ["h", "1"], [">", "Ċ"], ["{", '"']]
    vocab = [*byte_characters(), *("".join(pair) for pair in merges)]
    size = len(vocab)
    model = {"type": "BPE", "vocab": {t: id for id, t in enumerate(vocab)}, "merges": merges}
    return {
        "version": "1.0",
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS["qwen2"].steps()},
        "decoder": bytes_step(use_regex=True),
        "model": model,
        "added_tokens": [
            *added(ENDS, size, True),
            *added([*MARKS, *HTML[:3]], size + len(ENDS), False),
        ],
    }


def sentence_piece(begins_with_space: bool) -> dict[str, Any]:
    """Return a tokenizer like Gemma's, or Llama 2's: added tokens are in the vocabulary."""
    special = ["<pad>", *ENDS]
    plain = [*MARKS, *HTML]
    ascii = [chr(byte) for byte in range(33, 127)]
    merges = [["t", "o"], ["o", "l"], ["to", "ol"], ["▁", "a"], ["h", "i"]]
    pieces = [*special, *plain, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *ascii]
    pieces += ["".join(pair) for pair in merges]
    space: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] if begins_with_space else []
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, space]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [*SENTENCE_PIECE, *([STRIP] if begins_with_space else [])],
        },
        "model": {
            "type": "BPE",
            "vocab": {piece: id for id, piece in enumerate(pieces)},
            "merges": merges,
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": "<pad>",
        },
        "added_tokens": [*added(special, 0, True), *added(plain, len(special), False)],
    }


SPECS = {
    "qwen": byte_level,
    "gemma": lambda: sentence_piece(begins_with_space=False),
    "llama": lambda: sentence_piece(begins_with_space=True),
}
MODELS = [*SPECS, "demo", *(["real qwen"] if QWEN_GGUF else [])]


@functools.cache
def model(name: str) -> Model:
    """Return one of `MODELS`."""
    if name in SPECS:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "tokenizer.json").write_bytes(msgspec.json.encode(SPECS[name]()))
            return loaded(folder, None, None)
    path = QWEN_GGUF if name == "real qwen" else find_demo_model()
    assert path is not None
    card = read_gguf(Path(path))
    return loaded(card.path, card.vocab_size, card.eos_token_ids)


def loaded(path: str, vocab_size: int | None, ends: list[int] | None) -> Model:
    """Return the model at a path, by default with some unused tokens and with `ENDS`."""
    data = read_tokenizer_json(Path(path))
    tokenizer, table = Tokenizer.from_buffer(data), read_table(msgspec.json.decode(data))
    assert table is not None
    found = tokenizer.get_added_tokens_decoder().items()
    special = {token.content: id for id, token in found if token.special}
    ends = ends or [special[end] for end in ENDS]
    compiler = GrammarCompiler(path, vocab_size or len(table.token_bytes) + 5, ends)
    spelled: dict[bytes, set[int]] = {}
    for id, token in enumerate(table.token_bytes):
        spelled.setdefault(token, set()).add(id)
    return Model(compiler, tokenizer, table, ends, special, spelled)
