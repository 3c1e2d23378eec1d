"""The least number of tokens is never more than there are."""

import unicodedata
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.model_card import find_demo_model
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.tokenizer_proc.encoding.token_bytes import (
    NFC_SHRINKS,
    TokenBytes,
    byte_characters,
    read_token_bytes,
)

BYTE_LEVEL = {"type": "ByteLevel"}
LETTERS = {written: id for id, written in enumerate(byte_characters().values())}


def spec(**fields: Any) -> bytes:
    """Write a byte-level tokenizer whose longest token is the word "longest"."""
    model = {"type": "BPE", "vocab": LETTERS | {"longest": 256}}
    return msgspec.json.encode({"model": model, "pre_tokenizer": BYTE_LEVEL} | fields)


def demo() -> tuple[tokenizers.Tokenizer, TokenBytes]:
    path = find_demo_model()
    assert path is not None
    data = read_tokenizer_json(path)
    found = read_token_bytes(data)
    assert found is not None
    return tokenizers.Tokenizer.from_buffer(data), found


def test_the_longest_token_counts() -> None:
    assert read_token_bytes(spec()) == TokenBytes(longest=7, lost=b"")
    token = {"content": "<|a control token|>"}
    assert read_token_bytes(spec(added_tokens=[token])) == TokenBytes(19, b"")


def test_a_count_is_rounded_up() -> None:
    counts = [TokenBytes(7, b"").fewest_tokens(text) for text in ("", "a", "a" * 7, "é" * 4)]
    assert counts == [0, 1, 1, 2]


def test_bytes_that_the_vocabulary_lacks_are_not_counted() -> None:
    vocab = {written: id for written, id in LETTERS.items() if written != "b"}
    found = read_token_bytes(spec(model={"type": "BPE", "vocab": vocab}))
    assert found == TokenBytes(1, b"b")
    assert found.fewest_tokens("abba") == 2


def test_sentencepiece_with_all_bytes_keeps_all_bytes() -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁longest": 256}
    model = {"type": "BPE", "vocab": vocab, "byte_fallback": True}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace],
    }
    fields = {"model": model, "normalizer": normalizer, "pre_tokenizer": None}
    assert read_token_bytes(spec(**fields)) == TokenBytes(10, b"")
    del vocab["<0x41>"]
    assert read_token_bytes(spec(**fields)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"model": {"type": "WordPiece", "vocab": {}}},
        {"model": {"type": "Unigram", "vocab": [["a", -1.0]]}},
        {"model": {"type": "BPE", "vocab": LETTERS}, "pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Strip"}]}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Split", "behavior": "Removed"}, BYTE_LEVEL],
            }
        },
        {"added_tokens": [{"content": "<x>", "rstrip": True}]},
    ],
)
def test_where_characters_may_vanish_nothing_is_said(fields: dict[str, Any]) -> None:
    assert read_token_bytes(spec(**fields)) is None


def test_composing_shortens_a_text_no_further_than_reckoned() -> None:
    assert read_token_bytes(spec(normalizer={"type": "NFC"})) == TokenBytes(7 * NFC_SHRINKS, b"")
    longest: dict[str, int] = {}  # bytes of the longest character that decomposes into just this
    everything = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    for character in everything:
        parts = unicodedata.normalize("NFD", character)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(character.encode()))
    for character in everything:
        parts = unicodedata.normalize("NFD", character)
        before = sum(longest.get(part, len(part.encode())) for part in parts)
        assert before <= NFC_SHRINKS * len(character.encode()), hex(ord(character))


@settings(max_examples=60, deadline=None)
@given(st.text(), st.integers(1, 200))
def test_a_text_has_at_least_so_many_tokens(text: str, times: int) -> None:
    tokenizer, token_bytes = DEMO
    for repeated in (text * times, "\n" + " " * 80 * times + text):
        assert token_bytes.fewest_tokens(repeated) <= len(tokenizer.encode(repeated).ids)


DEMO = demo()
