"""Text to token ids, by `fastokens` where that gives the ids of `tokenizers`.

`tokenizers` defines correctness and loads in a third of the time. It serves until `fastokens` is
loaded and checked beside it (`load_fast`). That is several times faster and makes no Python object
per token. A tokenizer that `fastokens` does not support, or for which ids differ, stays with
`tokenizers`. So does a single text on which it gives up, such as a million spaces.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import tokenizers

from headrace.errors import ModelError
from headrace.model.mistral_tokenizer import is_mistral_tokenizer
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.system.malloc import give_back
from headrace.tokenizer_proc.encoding.infilling import LOOKED_FOR
from headrace.tokenizer_proc.encoding.pairs import PairMarks
from headrace.tokenizer_proc.encoding.probe_texts import CORPUS
from headrace.tokenizer_proc.encoding.token_bytes import TokenBytes, read_token_bytes
from headrace.tokenizer_proc.jobs.stages import Ids, Text, ids_of

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece spells it

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """A library's tokenizer of one model."""

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[Ids]:
        """Return the token ids of each text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        ...

    def token(self, id: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        ...


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise ValueError where a library's Rust panics, which else ends the process."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # PyO3's, which cannot be imported
            raise
        raise ValueError(f"the library panicked: {error}") from error


class HuggingFace:
    """`tokenizers`, whose ids are right by definition."""

    def __init__(self, data: bytes, reads_special: bool = True) -> None:
        """Load a tokenizer. Without `reads_special` the names of special tokens are text."""
        self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        self._tokenizer.encode_special_tokens = not reads_special
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[Ids]:
        """Return the token ids of each text."""
        # The one call that lets other threads run meanwhile, and computes no offsets.
        with panics_as_errors():
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [ids_of(encoding.ids) for encoding in found]

    def pair_marks(self) -> PairMarks:
        """Return the special tokens around two texts, as encoded for a short pair."""
        found = self._tokenizer.encode("a", "b")
        ids, types, owners = found.ids, found.type_ids, found.sequence_ids
        first, second = owners.index(0), owners.index(1)
        middle = len(owners) - owners[::-1].index(0)
        end = len(owners) - owners[::-1].index(1)
        return PairMarks(
            ids_of(ids[:first]),
            ids_of(ids[middle:second]),
            ids_of(ids[end:]),
            types.index(1) - middle if 1 in types else None,
        )

    @property
    def decodes_bytes(self) -> bool:
        """Whether a text is that of its tokens' bytes, one after the other."""
        return isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)

    @property
    def prepends_space(self) -> bool:
        """Whether a text is encoded with a space before it, as SentencePiece does."""
        found = self._tokenizer.encode("a", add_special_tokens=False).tokens
        return bool(found) and found[0].startswith(SPACE)

    def special_tokens(self) -> dict[str, int]:
        """Return the ids of the special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, id: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        return self._tokenizer.id_to_token(id)

    def ids(self, spellings: Iterable[str]) -> dict[str, int]:
        """Return the ids of those spellings that are tokens."""
        found = {text: self._tokenizer.token_to_id(text) for text in spellings}
        return {text: id for text, id in found.items() if id is not None}


class Fast:
    """`fastokens`. It may raise ValueError for a text."""

    def __init__(self, data: bytes) -> None:
        """Load a tokenizer; raises ValueError for one of a kind that it does not know."""
        import fastokens  # here, so that nothing waits for it at the start

        self._tokenizer = fastokens.Tokenizer.from_json_str(data.decode())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[Ids]:
        """Return the token ids of each text."""
        with panics_as_errors():
            flat, borders = self._tokenizer.encode_batch_flat(texts, add_special_tokens)
        ids, at = memoryview(flat).cast("I"), memoryview(borders).cast("Q")
        return [ids[at[i] : at[i + 1]] for i in range(len(texts))]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, id: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        token: str | None = self._tokenizer.id_to_token(id)
        return token


class Encoder:
    """Encodes texts of one model as u32 buffers, ready to travel beside a message."""

    def __init__(self, model: str) -> None:
        """Load the tokenizer of the model at path `model`.

        Raises:
            ModelError: there is none, or `tokenizers` cannot load it.
        """
        self._model = model
        self._exact: HuggingFace | None = None
        self._fast: Fast | None = None
        self._pair_marks: PairMarks | None = None
        self._json: bytes | None = read_tokenizer_json(Path(model))  # until `load_fast` has run
        self._reads_special = not is_mistral_tokenizer(Path(model))
        self.empty = self._load_exact().encode([""], add_special_tokens=True)[0]
        self.decodes_bytes = self._load_exact().decodes_bytes
        self.special_tokens = self._load_exact().special_tokens()
        self.infill_tokens = self._load_exact().ids(LOOKED_FOR)
        self.prepends_space = self._load_exact().prepends_space
        self.token_bytes: TokenBytes | None = None  # known once `load_fast` has run

    def load_fast(self) -> None:
        """Load `fastokens` and change over to it if it gives the same ids. Another thread may."""
        data, self._json = self._json, None
        assert data is not None, "it has run"
        try:
            self.token_bytes = read_token_bytes(data)
            if not self._reads_special:
                raise ValueError("it takes the names of special tokens for them")
            fast = load_checked(data, self._load_exact())
        except ValueError as error:
            log.info("encoding with tokenizers, not with fastokens: %s", error)
            return
        self._fast = fast
        self._exact = None  # loaded again if need be
        give_back()  # a tokenizer takes 30 to 300 MB

    def encode(self, texts: list[Text]) -> list[Ids]:
        """Return the token ids of each text."""
        found: list[Ids] = [text.ids or memoryview(b"") for text in texts]
        for special in (False, True):
            places = [
                i
                for i, text in enumerate(texts)
                if text.ids is None and not text.pieces and text.add_special_tokens is special
            ]
            if places:
                ids = self._encode([texts[i].text for i in places], special)
                for place, one in zip(places, ids, strict=True):
                    found[place] = one
        for place, text in enumerate(texts):
            if text.pieces:
                ids = self._encode(list(text.pieces), special=False)
                found[place] = memoryview(b"".join(ids)).cast("I")
        return found

    def _encode(self, texts: list[str], special: bool) -> list[Ids]:
        if self._fast is not None:
            try:
                return self._fast.encode(texts, special)
            except ValueError as error:
                if len(texts) > 1:  # only one of them is to blame
                    return [ids for text in texts for ids in self._encode([text], special)]
                log.debug("fastokens gave up on a text of %d characters: %s", len(texts[0]), error)
        return self._load_exact().encode(texts, special)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""
        return (self._fast or self._load_exact()).decode(ids, skip_special_tokens)

    def pair_marks(self) -> PairMarks:
        """Return the special tokens around two texts that are read as one."""
        if self._pair_marks is None:
            self._pair_marks = self._load_exact().pair_marks()
        return self._pair_marks

    def tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return each token as the vocabulary spells it; None is no token."""
        return list(map((self._fast or self._load_exact()).token, ids))

    def _load_exact(self) -> HuggingFace:
        exact = self._exact
        if exact is None:
            data = self._json or read_tokenizer_json(Path(self._model))
            try:
                exact = self._exact = HuggingFace(data, self._reads_special)
            except Exception as error:  # tokenizers raises plain Exception
                raise ModelError(
                    f"{self._model}: its tokenizer cannot be loaded: {error}"
                ) from error
        return exact


def load_checked(data: bytes, exact: Tokenizer) -> Fast:
    """Load `fastokens`; raises ValueError where it cannot, or is not the same as `exact`."""
    fast = Fast(data)
    difference = first_difference(fast, exact)
    if difference is not None:
        raise ValueError(difference)
    return fast


def first_difference(fast: Tokenizer, exact: Tokenizer) -> str | None:
    """Return on which text of the corpus two tokenizers disagree; None is on none."""
    for special in (False, True):
        pairs = zip(fast.encode(CORPUS, special), exact.encode(CORPUS, special), strict=True)
        for text, (ids, right) in zip(CORPUS, pairs, strict=True):
            if ids != right:
                return f"other ids for {text[:40]!r}"
            for skip in (False, True):
                if fast.decode(right, skip) != exact.decode(right, skip):
                    return f"another text for the ids of {text[:40]!r}"
    return None
