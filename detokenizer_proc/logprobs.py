"""Log probabilities as clients read them: OpenAI's two forms, and vLLM's of a prompt.

A token's text is that of its own bytes; what is no character by itself shows as U+FFFD, and
`bytes` has the truth. The tokens told are those that the text is made of: a stop token is not told,
nor what a stop string cuts off (as with OpenAI; vLLM tells both).
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
    offset: int  # characters of the text before it


def told_tokens(ids: list[int], logprobs: list[TokenLogprob], count: int) -> list[ToldToken]:
    """Return the first `count` of new tokens, for a form that tells all that was computed."""
    return [ToldToken(id, one, 0) for id, one in zip(ids[:count], logprobs, strict=False)]


class LogprobForms:
    """Renders log probabilities with one vocabulary; `num_top` likeliest tokens each."""

    def __init__(self, vocabulary: Vocabulary, tokens_as_ids: bool = False) -> None:
        """With `tokens_as_ids` OpenAI's forms spell a token "token_id:123", as vLLM does."""
        self._vocabulary = vocabulary
        self._tokens_as_ids = tokens_as_ids

    def text(self, id: int) -> str:
        """Return the text of a token by itself."""
        return self._vocabulary.token_bytes(id).decode(errors="replace")

    def spelled(self, id: int) -> str:
        """Return what a token is called in OpenAI's forms."""
        return f"token_id:{id}" if self._tokens_as_ids else self.text(id)

    def chat(self, told: list[ToldToken], num_top: int) -> Object:
        """Return `logprobs` of a chat's choice."""
        return {"content": [self._chat_token(token, num_top) for token in told], "refusal": None}

    def _chat_token(self, token: ToldToken, num_top: int) -> Object:
        assert token.likely is not None, "a chat tells nothing of its prompt"
        top = token.likely.top[:num_top]
        return self._chat_entry(token.id, token.likely.logprob) | {
            "top_logprobs": [self._chat_entry(id, logprob) for id, logprob in top]
        }

    def _chat_entry(self, id: int, logprob: float) -> Object:
        data = self._vocabulary.token_bytes(id)
        return {
            "token": self.spelled(id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(data),
        }

    def completion(self, told: list[ToldToken], num_top: int) -> Object:
        """Return `logprobs` of a completion's choice.

        The token itself is among the top ones, as with OpenAI, so there may be one more.
        """
        return {
            "text_offset": [token.offset for token in told],
            "token_logprobs": [
                None if token.likely is None else max(token.likely.logprob, LOWEST)
                for token in told
            ],
            "tokens": [self.spelled(token.id) for token in told],
            "top_logprobs": [self._top(token, num_top) for token in told],
        }

    def _top(self, token: ToldToken, num_top: int) -> Object | None:
        if token.likely is None:
            return None
        top: Object = {}
        for id, logprob in [(token.id, token.likely.logprob), *token.likely.top[:num_top]]:
            top.setdefault(self.spelled(id), max(logprob, LOWEST))  # the token itself goes first
        return top

    def generate(self, told: list[ToldToken], num_top: int) -> Object:
        """Return SGLang's two columns: of each token itself, and of the likeliest in its place.

        An entry is log probability, token id and text; a prompt's first token has no probability.
        """
        return {
            "token_logprobs": [
                self._triple(token.id, token.likely.logprob if token.likely else None)
                for token in told
            ],
            "top_logprobs": [
                token.likely and [self._triple(*one) for one in token.likely.top[:num_top]]
                for token in told
            ],
        }

    def _triple(self, id: int, logprob: float | None) -> list[float | int | str | None]:
        return [None if logprob is None else max(logprob, LOWEST), id, self.text(id)]

    def prompt(self, told: list[ToldToken], num_top: int) -> list[Object | None]:
        """Return vLLM's `prompt_logprobs`: of each token itself and of the likeliest, by id."""
        return [self._prompt_token(token, num_top) for token in told]

    def _prompt_token(self, token: ToldToken, num_top: int) -> Object | None:
        if token.likely is None:
            return None
        ranked = {token.id: (token.likely.logprob, token.likely.rank)}
        for rank, (id, logprob) in enumerate(token.likely.top[:num_top], 1):
            ranked.setdefault(id, (logprob, rank))
        return {
            str(id): {
                "logprob": max(logprob, LOWEST),
                "rank": rank,
                "decoded_token": self.text(id),
            }
            for id, (logprob, rank) in ranked.items()
        }
