"""Sampling parameters by vLLM's names, most of them OpenAI's too."""

from headrace.model.sampling_parameters import SamplingParameters


class SamplingParams(SamplingParameters, kw_only=True, omit_defaults=True):
    """Sampling fields of a request; None is the server's default.

    Values are checked where the server checks them, and refused with `ApiError`.
    """

    n: int | None = None  # answers to each prompt
    max_tokens: int | None = None  # default: 16, in a conversation all that the context has left
    seed: int | None = None
    logit_bias: dict[str, float] | None = None  # by token id
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    stop: str | list[str] | None = None  # text that ends an answer, and is not part of it
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
