"""SGLang's `/generate`: a text with its `meta_info`, whole or so far, with fields in wire order.

https://docs.sglang.ai/basic_usage/native_api.html
"""

from msgspec import UNSET, UnsetType

from headrace.response_bodies.base import Typed, Whole

LogprobEntry = tuple[float | None, int, str | None]  # log probability, token id, text
TopLogprobs = list[list[LogprobEntry] | None]


class Stopped(Typed, tag="stop"):
    """The text ended at a stop string or token, which is reported if known."""

    matched: str | int | None


class Cut(Typed, tag="length"):
    """The text reached its token limit."""

    length: int


class MetaSoFar(Whole, kw_only=True):
    """Metadata of a text so far. Log probabilities are there if requested."""

    id: str
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_top_logprobs: TopLogprobs | UnsetType = UNSET
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    input_top_logprobs: TopLogprobs | UnsetType = UNSET
    finish_reason: Stopped | Cut | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | UnsetType = UNSET  # seconds, at the end


class MetaInfo(MetaSoFar, kw_only=True):
    """Metadata of a text."""

    finish_reason: Stopped | Cut
    e2e_latency: float  # seconds


class GeneratedText(Whole):
    """Response of `/generate`, or one of several."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


Generated = GeneratedText | list[GeneratedText]


class GenerateEvent(Whole):
    """An event of `/generate`: all of a text so far. "[DONE]" follows the last."""

    text: str
    output_ids: list[int]
    meta_info: MetaSoFar
    index: int | UnsetType = UNSET  # of several
