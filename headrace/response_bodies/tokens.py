"""Bodies of routes that count, encode or decode tokens."""

from typing import Literal

from headrace.response_bodies.base import Whole


class TokenizeResponse(Whole):
    """Response of `/tokenize`. `token_strs` has the vocabulary's spelling, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeResponse(Whole):
    """Response of `/detokenize`."""

    prompt: str


class InputTokens(Whole):
    """Response of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenCount(Whole):
    """Response of `/v1/messages/count_tokens`."""

    input_tokens: int
