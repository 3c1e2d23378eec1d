"""Token ids to text, a token at a time.

Text is given out only in whole characters: bytes of a character that is not complete wait for the
token that completes it. What never becomes a character is U+FFFD, as in decoding all at once.
"""

import codecs
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.errors import ModelError
from headrace.model.token_table import TokenTable, read_table
from headrace.model.tokenizer_json import read_tokenizer_spec


class TextStream(Protocol):
    """The text of one sequence."""

    def feed(self, id: int) -> str:
        """Return the text that became certain with this token."""
        ...

    def flush(self) -> str:
        """Return the remaining text at the end."""
        ...


class Vocabulary(Protocol):
    """Opens the text streams of one tokenizer."""

    def stream(
        self,
        skip_special_tokens: bool,
        spaces_between: bool = True,
        kept: frozenset[str] = frozenset(),
    ) -> TextStream:
        """Open a stream; `spaces_between` special tokens stay, where a decoder puts them.

        The special tokens `kept` are never skipped.
        """
        ...

    def special_tokens(self, contents: frozenset[str]) -> dict[int, str]:
        """Return those special tokens, by id, whose text is one of `contents`."""
        ...

    def token_bytes(self, id: int) -> bytes:
        """Return what a token is by itself; an unknown id is nothing."""
        ...


class ByteStream:
    """A stream over a table of each token's bytes. Special tokens `kept` are never skipped."""

    def __init__(
        self,
        table: TokenTable,
        skip_special_tokens: bool,
        kept: Collection[int] = (),
    ) -> None:
        self._token_bytes = table.token_bytes
        self._skipped = table.special if skip_special_tokens else frozenset[int]()
        if kept and self._skipped:
            self._skipped = self._skipped.difference(kept)
        self._strips_space = table.strips_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, id: int) -> str:
        """Return the text that became certain with this token; unknown ids have none."""
        if id in self._skipped or id >= len(self._token_bytes):
            return ""
        token = self._token_bytes[id]
        if self._strips_space and token:
            self._strips_space = False
            token = token.removeprefix(b" ")
        return self._decoder.decode(token)

    def flush(self) -> str:
        """Return U+FFFD for a character that stayed incomplete."""
        return self._decoder.decode(b"", final=True)


class TableVocabulary:
    """Byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece with byte fallback (Llama 2, Gemma):
    a token is a run of bytes, whatever comes before."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self._special: dict[frozenset[str], dict[int, str]] = {}  # by contents; these are few

    def stream(
        self,
        skip_special_tokens: bool,
        spaces_between: bool = True,
        kept: frozenset[str] = frozenset(),
    ) -> TextStream:
        """Open a stream. Nothing is put between tokens."""
        return ByteStream(self.table, skip_special_tokens, self.special_tokens(kept))

    def special_tokens(self, contents: frozenset[str]) -> dict[int, str]:
        """Return those special tokens, by id, whose text is one of `contents`."""
        found = self._special.get(contents)
        if found is None:
            found = self._special[contents] = special_tokens(self.table, contents)
        return found

    def token_bytes(self, id: int) -> bytes:
        """Return what a token is by itself; an unknown id is nothing."""
        return self.table.token_bytes[id] if id < len(self.table.token_bytes) else b""


def special_tokens(table: TokenTable, contents: frozenset[str]) -> dict[int, str]:
    """Return those special tokens of a table, by id, whose text is one of `contents`."""
    spelled = {content.encode(): content for content in contents}
    tokens = ((id, spelled.get(table.token_bytes[id])) for id in table.special if spelled)
    return {id: content for id, content in tokens if content is not None}


def load_vocabulary(model: str) -> Vocabulary:
    """Load the tokenizer of the model at path `model`.

    Raises:
        ModelError: it has none that can be loaded.
    """
    spec = read_tokenizer_spec(Path(model))
    try:
        table = read_table(spec)
        if table is not None:
            return TableVocabulary(table)
        from headrace.detokenizer_proc.tokenizers_text import load_library

        return load_library(msgspec.json.encode(spec))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{model}: its tokenizer cannot be loaded: {error}") from error
