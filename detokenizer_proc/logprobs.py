"""Log probabilities as clients read them: OpenAI's two forms, and vLLM's of a prompt.

A token's text is that of its own bytes; what is no character by itself shows as U+FFFD, and `bytes`
has the truth. The reported tokens are those of the text. A stop token is not reported, nor are
tokens that a stop string cuts off (as with OpenAI; vLLM reports both).
"""

from typing import Any

from headrace.detokenizer_proc.renderers.json_slices import LazyList
from headrace.detokenizer_proc.reported_tokens import ReportedToken, ReportedTokens
from headrace.detokenizer_proc.text import Vocabulary
from headrace.response_bodies.logprobs import (
    ChatCompletionLogProb,
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    CompletionLogProbs,
    PromptLogProb,
)

LOWEST = -9999.0  # OpenAI's number for what cannot be; JSON has no minus infinity

Object = dict[str, Any]


class LogprobForms:
    """Renders log probabilities with one vocabulary; `num_top` likeliest tokens each.

    Lists are lazy: a response may report millions of tokens.
    """

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

    def chat(self, reported: ReportedTokens, num_top: int) -> ChatCompletionLogProbs:
        """Return `logprobs` of a chat's choice."""
        content: Any = LazyList(reported, lambda token: self._chat_token(token, num_top))
        return ChatCompletionLogProbs(content=content, refusal=None)

    def _chat_token(self, token: ReportedToken, num_top: int) -> ChatCompletionLogProbsContent:
        assert token.likely is not None, "a chat has no logprobs of its prompt"
        top = token.likely.top[:num_top]
        return ChatCompletionLogProbsContent(
            token=self.spelled(token.id),
            logprob=max(token.likely.logprob, LOWEST),
            bytes=list(self._vocabulary.token_bytes(token.id)),
            top_logprobs=[self._chat_entry(id, logprob) for id, logprob in top],
        )

    def _chat_entry(self, id: int, logprob: float) -> ChatCompletionLogProb:
        return ChatCompletionLogProb(
            token=self.spelled(id),
            logprob=max(logprob, LOWEST),
            bytes=list(self._vocabulary.token_bytes(id)),
        )

    def completion(self, reported: ReportedTokens, num_top: int) -> CompletionLogProbs:
        """Return `logprobs` of a completion's choice.

        The token itself is among the top ones, as with OpenAI, so there may be one more.
        """
        columns: Object = {
            "text_offset": reported.offsets,
            "token_logprobs": LazyList(reported, logprob_of),
            "tokens": LazyList(reported.ids, self.spelled),
            "top_logprobs": LazyList(reported, lambda token: self._top(token, num_top)),
        }
        return CompletionLogProbs(**columns)

    def _top(self, token: ReportedToken, num_top: int) -> Object | None:
        if token.likely is None:
            return None
        top: Object = {}
        for id, logprob in [(token.id, token.likely.logprob), *token.likely.top[:num_top]]:
            top.setdefault(self.spelled(id), max(logprob, LOWEST))  # the token itself goes first
        return top

    def generate(self, reported: ReportedTokens, num_top: int) -> Object:
        """Return SGLang's two columns: of each token itself, and of the likeliest in its place.

        An entry is log probability, token id and text; a prompt's first token has no probability.
        """
        return {
            "token_logprobs": LazyList(
                reported, lambda token: self._triple(token.id, logprob_of(token))
            ),
            "top_logprobs": LazyList(reported, lambda token: self._top_triples(token, num_top)),
        }

    def _top_triples(self, token: ReportedToken, num_top: int) -> list[Any] | None:
        if token.likely is None:
            return None
        return [self._triple(*one) for one in token.likely.top[:num_top]]

    def _triple(self, id: int, logprob: float | None) -> list[float | int | str | None]:
        return [None if logprob is None else max(logprob, LOWEST), id, self.text(id)]

    def prompt(self, reported: ReportedTokens, num_top: int) -> LazyList:
        """Return vLLM's `prompt_logprobs`: of each token itself and of the likeliest, by id."""
        return LazyList(reported, lambda token: self._prompt_token(token, num_top))

    def _prompt_token(self, token: ReportedToken, num_top: int) -> dict[str, PromptLogProb] | None:
        if token.likely is None:
            return None
        ranked = {token.id: (token.likely.logprob, token.likely.rank)}
        for rank, (id, logprob) in enumerate(token.likely.top[:num_top], 1):
            ranked.setdefault(id, (logprob, rank))
        return {
            str(id): PromptLogProb(
                logprob=max(logprob, LOWEST), rank=rank, decoded_token=self.text(id)
            )
            for id, (logprob, rank) in ranked.items()
        }


def logprob_of(token: ReportedToken) -> float | None:
    """Return how likely a token was, as JSON has it; None where it follows nothing."""
    return None if token.likely is None else max(token.likely.logprob, LOWEST)
