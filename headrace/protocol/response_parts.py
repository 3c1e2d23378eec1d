"""Parts of OpenAI's responses, with their fields in the order that clients see.

https://platform.openai.com/docs/api-reference/responses/object
"""

from typing import Any, Literal

from headrace.client.responses import ChosenToken
from headrace.protocol.base import Typed, Whole


class OutputText(Typed, tag="output_text"):
    """Words to the reader."""

    text: str
    annotations: list[Any]
    logprobs: list[ChosenToken]


class ReasoningText(Typed, tag="reasoning_text"):
    """Thoughts."""

    text: str


class InputDetails(Whole):
    """How many tokens of an input were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Whole):
    """How many tokens of an output were thoughts."""

    reasoning_tokens: int


class ResponseUsage(Whole):
    """How many tokens a response took."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Whole):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(Whole):
    """Why a response has failed."""

    code: str
    message: str
