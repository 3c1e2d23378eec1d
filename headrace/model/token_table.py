"""The bytes of each token of a vocabulary, and which tokens are special, from `tokenizer.json`.

Detokenizers write texts by this table and grammars allow tokens by it, so both mean one text.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# The decoders of a SentencePiece model in `tokenizer.json`; the last only where texts begin with a
# space that was not there.
SENTENCE_PIECE = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
OUTSIDE_LATIN_1 = 0xFFFD
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTable(NamedTuple):
    """A vocabulary whose texts are their tokens' bytes, one after the other."""

    token_bytes: list[bytes]
    special: frozenset[int]
    strips_first_space: bool = False


def read_table(spec: dict[str, Any]) -> TokenTable | None:
    """Return the table of a `tokenizer.json`; None if a token's text depends on its neighbors."""
    decoder = spec.get("decoder") or {}
    if decoder.get("type") == "ByteLevel":
        return table_of(spec, functools.partial(byte_level, bytes_as=BytesAs()), False)
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else []
    if steps[:3] != SENTENCE_PIECE or steps[3:] not in ([], [STRIP]):
        return None
    return table_of(spec, sentence_piece, strips_first_space=steps[3:] == [STRIP])


def table_of(
    spec: dict[str, Any], bytes_of: Callable[[str], bytes], strips_first_space: bool
) -> TokenTable:
    """Return the table of a vocabulary whose tokens are spelled in some way."""
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pieces and their scores
        vocabulary = {piece: id for id, (piece, _) in enumerate(vocabulary)}
    added = spec.get("added_tokens", [])
    size = 1 + max([*vocabulary.values(), *(token["id"] for token in added)])
    token_bytes = [b""] * size
    for token, id in vocabulary.items():
        token_bytes[id] = bytes_of(token)
    for token in added:
        content = token["content"]
        is_piece = bytes_of is sentence_piece  # whose decoder has no added tokens
        token_bytes[token["id"]] = sentence_piece(content) if is_piece else content.encode()
    special = frozenset(token["id"] for token in added if token["special"])
    return TokenTable(token_bytes, special, strips_first_space)


class BytesAs(dict[int, int]):
    """Maps what byte-level BPE writes for a byte to Latin-1's character, and others out of it."""

    def __init__(self) -> None:
        super().__init__((ord(char), byte) for byte, char in enumerate(byte_characters()))

    def __missing__(self, char: int) -> int:
        return OUTSIDE_LATIN_1


def byte_level(token: str, bytes_as: Mapping[int, int]) -> bytes:
    """Return the bytes of a token that is written with a character for each."""
    try:
        return token.translate(bytes_as).encode("latin-1")
    except UnicodeEncodeError:  # it is text
        return token.encode()


def sentence_piece(token: str) -> bytes:
    """Return the bytes of a piece: a space is U+2581, and a byte that is no character `<0xE2>`."""
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def byte_characters() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
