"""Token ids to text, a token at a time.

Text is given out only in whole characters: bytes of a character that is not complete wait for the
token that completes it. What never becomes a character is U+FFFD, as in decoding all at once.
"""

import codecs
from pathlib import Path
from typing import Protocol

import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream

from headrace.errors import ModelError
from headrace.model.token_table import TokenTable, read_table, sentence_piece
from headrace.model.tokenizer_json import read_tokenizer_json


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

    def token_bytes(self, id: int) -> bytes:
        """Return what a token is by itself; an unknown id is nothing."""
        ...


class ByteStream:
    """A stream over a table of each token's bytes."""

    def __init__(
        self,
        table: TokenTable,
        skip_special_tokens: bool,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        self._token_bytes = table.token_bytes
        self._skipped = table.special if skip_special_tokens else frozenset[int]()
        if kept:
            contents = {content.encode() for content in kept}
            self._skipped -= {id for id in self._skipped if table.token_bytes[id] in contents}
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

    def stream(
        self,
        skip_special_tokens: bool,
        spaces_between: bool = True,
        kept: frozenset[str] = frozenset(),
    ) -> TextStream:
        """Open a stream. Nothing is put between tokens."""
        return ByteStream(self.table, skip_special_tokens, kept)

    def token_bytes(self, id: int) -> bytes:
        """Return what a token is by itself; an unknown id is nothing."""
        return self.table.token_bytes[id] if id < len(self.table.token_bytes) else b""


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


class UnspacedStream:
    """A stream without what its decoder puts between special tokens, as vLLM does it."""

    def __init__(self, stream: TextStream, added: dict[int, str]) -> None:
        self._stream = stream
        self._added = added
        self._follows_added = False

    def feed(self, id: int) -> str:
        """Return the text that became certain with this token."""
        text = self._stream.feed(id)
        token = self._added.get(id)
        if token is not None and self._follows_added:
            text = token
        self._follows_added = token is not None
        return text

    def flush(self) -> str:
        """Return the remaining text at the end."""
        return self._stream.flush()


class SelectiveStream:
    """A stream to which some tokens are unknown."""

    def __init__(self, stream: TextStream, unknown: frozenset[int]) -> None:
        self._stream = stream
        self._unknown = unknown

    def feed(self, id: int) -> str:
        """Return the text that became certain with this token."""
        return "" if id in self._unknown else self._stream.feed(id)

    def flush(self) -> str:
        """Return the remaining text at the end."""
        return self._stream.flush()


class LibraryVocabulary:
    """Any tokenizer that `tokenizers` can load."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self._special = {id: token.content for id, token in added.items() if token.special}

    def stream(
        self,
        skip_special_tokens: bool,
        spaces_between: bool = True,
        kept: frozenset[str] = frozenset(),
    ) -> TextStream:
        """Open a stream."""
        if skip_special_tokens and kept & {*self._special.values()}:
            skipped = (id for id, content in self._special.items() if content not in kept)
            return SelectiveStream(LibraryStream(self._tokenizer, False), frozenset(skipped))
        stream = LibraryStream(self._tokenizer, skip_special_tokens)
        if spaces_between or skip_special_tokens:
            return stream
        return UnspacedStream(stream, self._added)

    def token_bytes(self, id: int) -> bytes:
        """Return what a token is by itself; an unknown id is nothing."""
        return sentence_piece(self._tokenizer.id_to_token(id) or "")


def load_vocabulary(model: str) -> Vocabulary:
    """Load the tokenizer of the model at path `model`.

    Raises:
        ModelError: it has none that can be loaded.
    """
    data = read_tokenizer_json(Path(model))
    try:
        spec = msgspec.json.decode(data)
        table = read_table(spec)
        if table is not None:
            return TableVocabulary(table)
        return LibraryVocabulary(tokenizers.Tokenizer.from_buffer(data))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{model}: its tokenizer cannot be loaded: {error}") from error
