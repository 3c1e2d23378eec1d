"""The prompts of a request: texts or token ids, which must fit the model."""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from headrace.config.process_configs import ModelCard
from headrace.errors import ContextLengthExceeded, InvalidValue, ModelNotFound, WrongKind
from headrace.ipc.adapter_registry import AdapterRegistry
from headrace.ipc.messages import AdapterSource, HttpRequest, share_key
from headrace.tokenizer_proc.encoding.pairs import PairMarks
from headrace.tokenizer_proc.encoding.token_bytes import TokenBytes
from headrace.tokenizer_proc.jobs.stages import Encoding, Ids, Text, ids_of
from headrace.tokenizer_proc.requests.sampling import check_token_ids


class PromptVocabulary(Protocol):
    """Tokenizer methods needed beside encoding."""

    empty: Ids  # the ids of a text without characters: the special tokens around every one
    token_bytes: TokenBytes | None
    special_tokens: dict[str, int]
    infill_tokens: dict[str, int]  # by spelling, see `infilling.LOOKED_FOR`
    prepends_space: bool  # to each text

    def pair_marks(self) -> PairMarks:
        """Return the special tokens around two texts."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out."""
        ...


class Prompts:
    """Prompt checks shared by all planners, for one model and vocabulary."""

    def __init__(
        self,
        card: ModelCard,
        vocabulary: PromptVocabulary,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self.card = card
        self.vocabulary = vocabulary
        self._adapters = adapters

    def adapter_of(self, name: str | None) -> AdapterSource | None:
        """Return the adapter that a request's `model` names, or None where that is the model.

        Raises:
            ModelNotFound: it is neither.
        """
        if name is None or name == self.card.name:
            return None
        adapter = None if self._adapters is None else self._adapters.find(name)
        if adapter is None:
            raise ModelNotFound(name, self.card.name)
        return adapter

    def check_model(self, name: str | None, embeds: bool = False, compares: bool = False) -> None:
        """Refuse a model that is not here, and one that does something else."""
        if self.adapter_of(name) is not None and embeds:
            raise WrongKind(f"'{name}' is an adapter, which generates text and has no embeddings")
        if self.card.compares and not compares:
            raise WrongKind(f"'{self.card.name}' compares texts; see /v1/rerank and /v1/score")
        if self.card.embeds and not embeds:
            raise WrongKind(f"'{self.card.name}' embeds and generates no text; see /v1/embeddings")
        if embeds and not (self.card.embeds or self.card.compares):
            raise WrongKind(f"'{self.card.name}' generates text and has no embeddings")

    def encode(
        self,
        texts: Sequence[str | list[int]],
        param: str,
        wanted: int | None,
        truncates: bool,
        add_special_tokens: bool = True,
    ) -> Encoding[list[Ids]]:
        """Return the ids of prompts that are texts or ids already."""
        strings = [text for text in texts if isinstance(text, str)]
        if not truncates:
            for string in strings:
                self.check_bytes(string, wanted, param)
        encoded = iter((yield [Text(string, add_special_tokens) for string in strings]))
        return [next(encoded) if isinstance(t, str) else self._given(t, param) for t in texts]

    def _given(self, ids: list[int], param: str) -> Ids:
        """Return a prompt that came as token ids."""
        check_token_ids(param, ids, self.card.vocab_size)
        return ids_of(ids)

    def check_bytes(self, text: str, wanted: int | None, param: str) -> None:
        """Refuse a text that is too long however it is encoded."""
        limit, token_bytes = self.card.max_model_len, self.vocabulary.token_bytes
        if token_bytes is None or len(text) <= limit:
            return
        fewest = token_bytes.fewest_tokens(text)
        if exceeds(fewest, wanted, limit):
            raise ContextLengthExceeded(fewest, wanted, limit, param, is_estimate=True)

    def kept(self, limit: int | None, wanted: int | None) -> int | None:
        """Return the number of prompt tokens kept by `truncate_prompt_tokens`.

        None is all of them, and -1 as many as leave room for what is wanted.
        """
        if limit != -1:
            return limit
        left = self.card.max_model_len - (1 if wanted is None else wanted)
        if left < 1:
            raise InvalidValue(
                f"truncate_prompt_tokens: -1 keeps what leaves room for an answer of {wanted} "
                f"tokens in a context of {self.card.max_model_len}; ask for fewer, or say how many "
                "are kept",
                "truncate_prompt_tokens",
            )
        return left

    def last_tokens(self, ids: Ids, limit: int | None) -> Ids:
        """Return the end of a text; a truncated text keeps its first special token."""
        begins = self.vocabulary.empty[:1]
        if limit is None or len(ids) <= limit or limit == 1 or begins != ids[:1]:
            return last_tokens(ids, limit)
        return joined(begins, last_tokens(ids, limit - 1))


def exceeds(num_prompt: int, wanted: int | None, limit: int) -> bool:
    """Whether a prompt leaves no room for one token, or with 0 wanted does not fit itself.

    What is wanted beyond the context is cut, so `wanted` is 0 or it is not.
    """
    return num_prompt + (wanted != 0) > limit


def last_tokens(ids: Ids, limit: int | None) -> Ids:
    """Return the last `limit` tokens of a prompt; the output follows its end."""
    return ids if limit is None else ids[-limit:]


def joined(first: Ids, second: Ids) -> Ids:
    """Return two parts of a prompt as one."""
    return memoryview(bytes(first) + bytes(second)).cast("I")


def public_id(http: HttpRequest, num_bytes: int) -> str:
    """Return a name for an answer: the same, should the request be sent again."""
    own = struct.pack("<Qd", http.first_id, http.received_at)
    return blake2b(own, digest_size=num_bytes).hexdigest()


def key_of(http: HttpRequest, user: str | None, adapter: AdapterSource | None = None) -> int:
    """Return whose share a request counts towards: its API key's, its user's or its adapter's."""
    if http.key:
        return http.key
    if user:
        return share_key(user.encode())
    return 0 if adapter is None else share_key(adapter.digest)
