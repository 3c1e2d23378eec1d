"""Log probabilities in OpenAI's two forms, and in vLLM's of a prompt.

https://platform.openai.com/docs/api-reference/chat/object
"""

from headrace.response_bodies.base import Whole


class ChatCompletionLogProb(Whole):
    """A token and its log probability. `bytes` may be less than a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatCompletionLogProbsContent(ChatCompletionLogProb, kw_only=True):
    """A token of a response, and the likeliest in its place."""

    top_logprobs: list[ChatCompletionLogProb]


class ChatCompletionLogProbs(Whole):
    """Log probabilities of a chat's response."""

    content: list[ChatCompletionLogProbsContent]
    refusal: None


class CompletionLogProbs(Whole):
    """Log probabilities of a completion, in columns.

    An entry is None for the first token of a prompt that is echoed.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogProb(Whole):
    """Log probability of a prompt token; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogProbs = list[dict[str, PromptLogProb] | None]  # by token id; None for the first
