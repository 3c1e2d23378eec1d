"""Token ids to text by the library `tokenizers`, where a token's text depends on its neighbors.

Imported for such a vocabulary only.
"""

import tokenizers
from tokenizers.decoders import DecodeStream

from headrace.detokenizer_proc.text import TextStream
from headrace.model.token_table import sentence_piece


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

    def special_tokens(self, contents: frozenset[str]) -> dict[int, str]:
        """Return those special tokens, by id, whose text is one of `contents`."""
        return {id: content for id, content in self._special.items() if content in contents}

    def token_bytes(self, id: int) -> bytes:
        """Return what a token is by itself; an unknown id is nothing."""
        return sentence_piece(self._tokenizer.id_to_token(id) or "")


def load_library(data: bytes) -> LibraryVocabulary:
    """Load a `tokenizer.json`; raises plain `Exception` where the library cannot."""
    return LibraryVocabulary(tokenizers.Tokenizer.from_buffer(data))
