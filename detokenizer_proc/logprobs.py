"""Log probabilities as clients read them: OpenAI's two forms, and vLLM's of a prompt.

A token's text is that of its own bytes; what is no character by itself shows as U+FFFD, and
`bytes` has the truth. A token that ends a text without being part of it is not told.
"""

from typing import Any, NamedTuple

from headrace.detokenizer_proc.text import Vocabulary
from headrace.messages import TokenLogprob

LOWEST = -9999.0  # OpenAI's number for what cannot be; JSON has no minus infinity

Object = dict[str, Any]


class ToldToken(NamedTuple):
    """A token and how likely it was; a prompt's first token has nothing to follow."""

    id: int
    likely: TokenLogprob | None


class LogprobForms:
    """Renders log probabilities with one vocabulary, with `num_top` likeliest tokens each."""

    def __init__(self, vocabulary: Vocabulary, num_top: int) -> None:
        self._vocabulary = vocabulary
        self._num_top = num_top

    def text(self, id: int) -> str:
        """Return the text of a token by itself."""
        return self._vocabulary.token_bytes(id).decode(errors="replace")

    def chat(self, told: list[ToldToken]) -> Object:
        """Return `logprobs` of a chat's choice."""
        return {"content": [self._chat_token(token) for token in told], "refusal": None}

    def _chat_token(self, token: ToldToken) -> Object:
        assert token.likely is not None, "a chat tells nothing of its prompt"
        top = token.likely.top[: self._num_top]
        return self._chat_entry(token.id, token.likely.logprob) | {
            "top_logprobs": [self._chat_entry(id, logprob) for id, logprob in top]
        }

    def _chat_entry(self, id: int, logprob: float) -> Object:
        data = self._vocabulary.token_bytes(id)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}

    def completion(self, told: list[ToldToken], offset: int) -> Object:
        """Return `logprobs` of a completion's choice, whose tokens begin at `offset` of its text.

        The token itself is among the top ones, as with OpenAI, so there may be one more.
        """
        texts = [self.text(token.id) for token in told]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [
                None if token.likely is None else max(token.likely.logprob, LOWEST)
                for token in told
            ],
            "tokens": texts,
            "top_logprobs": [self._top(token) for token in told],
        }

    def _top(self, token: ToldToken) -> Object | None:
        if token.likely is None:
            return None
        pairs = [*token.likely.top[: self._num_top], (token.id, token.likely.logprob)]
        return {self.text(id): max(logprob, LOWEST) for id, logprob in reversed(pairs)}

    def prompt(self, told: list[ToldToken]) -> list[Object | None]:
        """Return vLLM's `prompt_logprobs`: of each token itself and of the likeliest, by id."""
        return [self._prompt_token(token) for token in told]

    def _prompt_token(self, token: ToldToken) -> Object | None:
        if token.likely is None:
            return None
        ranked = {token.id: (token.likely.logprob, token.likely.rank)}
        for rank, (id, logprob) in enumerate(token.likely.top, 1):
            ranked.setdefault(id, (logprob, rank))
        return {
            str(id): {
                "logprob": max(logprob, LOWEST),
                "rank": rank,
                "decoded_token": self.text(id),
            }
            for id, (logprob, rank) in ranked.items()
        }
