"""Token ids to text, a token at a time.

Text is given out only in whole characters: bytes of a character that is not complete wait for the
token that completes it. What never becomes a character is U+FFFD, as in decoding all at once.
"""

import codecs
import re
from pathlib import Path
from typing import Any, Protocol

import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream

from headrace.errors import ModelError
from headrace.tokenizer_json import read_tokenizer_json

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TextStream(Protocol):
    """The text of one sequence."""

    def feed(self, id: int) -> str:
        """Return the text that became certain with this token."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


class Vocabulary(Protocol):
    """Opens the text streams of one tokenizer."""

    def stream(self, skip_special_tokens: bool) -> TextStream: ...

    def token_bytes(self, id: int) -> bytes:
        """Return what a token is by itself; an unknown id is nothing."""
        ...


class ByteStream:
    """A stream over a table of each token's bytes."""

    def __init__(self, token_bytes: list[bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, id: int) -> str:
        """Return the text that became certain with this token; unknown ids have none."""
        if id in self._skipped or id >= len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[id])

    def flush(self) -> str:
        """Return U+FFFD for a character that stayed incomplete."""
        return self._decoder.decode(b"", final=True)


class ByteLevelVocabulary:
    """Byte-level BPE (GPT-2, Llama 3, Qwen): a token is a run of bytes, whatever comes before."""

    def __init__(self, spec: dict[str, Any]) -> None:
        byte_of = {char: byte for byte, char in enumerate(byte_characters())}
        vocabulary = spec["model"]["vocab"]
        added = spec.get("added_tokens", [])
        size = 1 + max([*vocabulary.values(), *(token["id"] for token in added)])
        self._token_bytes = [b""] * size
        for token, id in vocabulary.items():
            if all(char in byte_of for char in token):
                self._token_bytes[id] = bytes(byte_of[char] for char in token)
            else:
                self._token_bytes[id] = token.encode()
        for token in added:
            self._token_bytes[token["id"]] = token["content"].encode()
        self._special = frozenset(token["id"] for token in added if token["special"])

    def stream(self, skip_special_tokens: bool) -> TextStream:
        """Open a stream."""
        return ByteStream(self._token_bytes, self._special if skip_special_tokens else frozenset())

    def token_bytes(self, id: int) -> bytes:
        """Return what a token is by itself; an unknown id is nothing."""
        return self._token_bytes[id] if id < len(self._token_bytes) else b""


class LibraryStream:
    """A stream over `tokenizers`' own, for decoders that look at neighboring tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._skip = skip_special_tokens
        self._ids: list[int] = []

    def feed(self, id: int) -> str:
        """Return the text that became certain with this token."""
        self._ids.append(id)
        try:
            text = self._stream.step(self._tokenizer, id) or ""
        except Exception:  # tokenizers raises plain Exception
            # A byte that forms no character made the ones before it invalid too, and those have
            # been given out: go on behind them.
            text = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
            self._stream = DecodeStream(self._ids, skip_special_tokens=self._skip)
        if text:
            self._ids.clear()
        return text

    def flush(self) -> str:
        """Return the text of the tokens that were held back."""
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)


class LibraryVocabulary:
    """Any tokenizer that `tokenizers` can load."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def stream(self, skip_special_tokens: bool) -> TextStream:
        """Open a stream."""
        return LibraryStream(self._tokenizer, skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """Return what a token is by itself; an unknown id is nothing.

        SentencePiece writes a space as U+2581, and a byte that is no character as `<0xE2>`.
        """
        token = self._tokenizer.id_to_token(id) or ""
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def byte_characters() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def load_vocabulary(model: str) -> Vocabulary:
    """Load the tokenizer of the model at path `model`.

    Raises:
        ModelError: it has none that can be loaded.
    """
    data = read_tokenizer_json(Path(model))
    try:
        spec = msgspec.json.decode(data)
        if (spec.get("decoder") or {}).get("type") == "ByteLevel":
            return ByteLevelVocabulary(spec)
        return LibraryVocabulary(tokenizers.Tokenizer.from_buffer(data))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{model}: its tokenizer cannot be loaded: {error}") from error
