"""Sampling fields of a request, and their ranges.

OpenAI's, and those that vLLM and SGLang add. https://platform.openai.com/docs/api-reference
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf
from operator import attrgetter
from typing import Any, Literal, TypeVar

import msgspec

from headrace.errors import InvalidValue, Unsupported
from headrace.ipc.messages import MAX_LOGPROBS
from headrace.model.sampling_defaults import SamplingDefaults
from headrace.model.sampling_parameters import PARAMETERS
from headrace.tokenizer_proc.requests.constraints import GrammarFields
from headrace.tokenizer_proc.requests.field_names import refuse

T = TypeVar("T")
MAX_SEQUENCES_PER_REQUEST = 128
MAX_STOP_STRINGS = 32
MAX_WORD_LENGTH = 1000  # characters of a stop string or a bad word
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 128
MAX_LOGIT_BIASES = 1024  # these three fit messages.MAX_BIASES together
MAX_DIGITS = 19  # of a token id, written in text
# Of vLLM's and SGLang's, what would change an answer and is not done.
UNSUPPORTED = (
    "kv_transfer_params",
    "logprob_token_ids",
    "prompt_embeds",
    "repetition_detection",
    "thinking_token_budget",
    "use_beam_search",
    "watermarking",
    "custom_logit_processor",
    "custom_params",
    "lora_path",
    "return_hidden_states",
    "stop_regex",
)
PARAMETER_VALUES = attrgetter(*PARAMETERS)
# Parameters above their lowest number, which they do not take.
ABOVE_LOW = [(name, one.low, one.high) for name, one in PARAMETERS.items() if one.excludes_low]
RANGES: dict[str, tuple[float, float | None]] = {
    "max_tokens": (1, None),
    "max_completion_tokens": (1, None),
    "max_output_tokens": (1, None),
    "max_new_tokens": (0, None),
    "min_new_tokens": (0, None),
    "top_logprobs_num": (0, MAX_LOGPROBS),
    "logprob_start_len": (-1, None),
    **{
        name: (one.low, None if one.high == inf else one.high)
        for name, one in PARAMETERS.items()
        if not one.excludes_low
    },
    "n": (1, MAX_SEQUENCES_PER_REQUEST),
    "best_of": (1, MAX_SEQUENCES_PER_REQUEST),
    "seed": (-(2**63), 2**63 - 1),
    "top_logprobs": (0, MAX_LOGPROBS),
    "min_tokens": (0, None),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "max_tokens_per_doc": (1, None),
    "max_chunks_per_doc": (1, None),
    "truncate_prompt_tokens": (-1, None),  # -1 is all there is room for; 0 is refused, too
    "top_n": (0, None),
    "priority": (-(2**31), 2**31 - 1),
}
# Of one kind of request, by its struct's name, what is otherwise than in `RANGES`.
OWN_RANGES: dict[str, dict[str, tuple[float, float | None]]] = {
    "CompletionRequest": {"max_tokens": (0, None)},
}


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: in every event, where there is usage at all


class SamplingFields(GrammarFields, kw_only=True):
    """Fields of both kinds of generation. The second group is vLLM's and SGLang's. So is the third,
    which is refused unless it changes nothing."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False  # the same, as SGLang calls it
    add_special_tokens: bool | None = None  # by default to a text, not to a conversation
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    allowed_token_ids: list[int] | None = None

    truncation_side: Literal["left", "right"] | None = None
    kv_transfer_params: Any = None
    logprob_token_ids: Any = None
    prompt_embeds: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    use_beam_search: Any = None
    watermarking: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    lora_path: Any = None
    return_hidden_states: Any = None
    stop_regex: Any = None

    @property
    def includes_stop(self) -> bool:
        """Whether stop strings are delivered."""
        return self.include_stop_str_in_output or self.no_stop_trim

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def num_sequences(self) -> int:
        """Number of continuations per prompt."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens reported per generated token; None without log
        probabilities."""
        raise NotImplementedError


def default_parameters(defaults: SamplingDefaults) -> dict[str, float]:
    """Return the parameters of a request without any: the model's, else the parameter's own."""
    return {name: getattr(defaults, name, one.default) for name, one in PARAMETERS.items()}


def parameters_of(request: SamplingFields, defaults: Mapping[str, float]) -> dict[str, Any]:
    """Return the request's parameters, else the `default_parameters`."""
    values = zip(defaults.items(), PARAMETER_VALUES(request), strict=True)
    return {name: default if value is None else value for (name, default), value in values}


def stated(value: T | None, default: T) -> T:
    """Return the request's value, or else the default."""
    return default if value is None else value


@cache
def ranges_of(
    kind: type[msgspec.Struct],
) -> tuple[Callable[[Any], tuple[Any, ...]], list[tuple[str, float, float]]]:
    """Return a function for the values of a kind's fields that have a range, and the ranges.

    There are two such fields at least.
    """
    ranges = dict(RANGES)
    for base in kind.__mro__:
        ranges |= OWN_RANGES.get(base.__name__, {})
    found = {name: one for name, one in ranges.items() if hasattr(kind, name)}
    return attrgetter(*found), [
        (name, low, inf if high is None else high) for name, (low, high) in found.items()
    ]


def check_ranges(request: msgspec.Struct) -> None:
    """Refuse numbers outside their ranges; the text has the range."""
    values_of, ranges = ranges_of(type(request))
    for place, given in enumerate(values_of(request)):
        if given is None:  # most are
            continue
        name, low, high = ranges[place]
        for value in given if isinstance(given, list) else (given,):
            if value is None or low <= value <= high:
                continue
            allowed = f"at least {low}" if high == inf else f"between {low} and {high}"
            raise InvalidValue(f"{name}: must be {allowed}, not {value}", name)
    name = "truncate_prompt_tokens"
    if getattr(request, name, None) == 0:
        raise InvalidValue(f"{name}: must be -1, all there is room for, or at least 1, not 0", name)


def check_sampling(request: SamplingFields) -> None:
    """Refuse what cannot be honored."""
    check_ranges(request)
    refuse(request, UNSUPPORTED)
    if request.truncation_side == "right":
        raise Unsupported(
            "truncation_side: must be 'left': a prompt that is cut keeps its end",
            "truncation_side",
        )
    for name, low, high in ABOVE_LOW:
        check_above(name, getattr(request, name), low, high)
    if request.stream_options is not None and not request.stream:
        raise InvalidValue("stream_options: only allowed with 'stream': true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise Unsupported("prompt_logprobs: not available with 'stream': true", "prompt_logprobs")
    check_words("stop", request.stops, MAX_STOP_STRINGS)
    check_words("bad_words", request.bad_words or [], MAX_BAD_WORDS)
    check_length("stop_token_ids", len(request.stop_token_ids or ()), MAX_STOP_TOKEN_IDS)
    if request.allowed_token_ids == []:
        raise InvalidValue("allowed_token_ids: must not be empty", "allowed_token_ids")
    check_length("logit_bias", len(request.logit_bias or ()), MAX_LOGIT_BIASES)


def check_above(name: str, value: float | None, low: float, high: float) -> None:
    """Refuse `low`, numbers below it, and numbers above `high`."""
    if value is not None and not low < value <= high:
        raise InvalidValue(f"{name}: must be above {low} and at most {high}, not {value}", name)


def check_words(name: str, words: list[str], limit: int) -> None:
    """Refuse too many strings, empty ones, and long ones: each sequence carries them."""
    wrong = [f"one of {len(word)}" for word in words if not 1 <= len(word) <= MAX_WORD_LENGTH]
    if len(words) > limit:
        wrong = [str(len(words))]
    if wrong:
        raise InvalidValue(
            f"{name}: must be at most {limit} strings of 1 to {MAX_WORD_LENGTH} characters, not "
            f"{wrong[0]}",
            name,
        )


def check_length(name: str, length: int, limit: int) -> None:
    """Refuse a field of too many entries."""
    if length > limit:
        raise InvalidValue(f"{name}: must have at most {limit} entries, not {length}", name)


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that are no tokens; the text names the first."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    for id in ids:
        if not 0 <= id < vocab_size:
            raise InvalidValue(
                f"{name}: {id} is not a token id; they go from 0 to {vocab_size - 1}", name
            )


def allowed_mask(request: SamplingFields, vocab_size: int, ends: list[int]) -> bytes:
    """Return `allowed_token_ids`, and `ends`, as a bit for each token, the lowest first.

    Empty is all tokens.
    """
    ids = request.allowed_token_ids
    if not ids:
        return b""
    check_token_ids("allowed_token_ids", ids, vocab_size)
    mask = bytearray(-(-vocab_size // 8))
    for id in (*ids, *ends):
        mask[id >> 3] |= 1 << (id & 7)
    return bytes(mask)


def bias_of(request: SamplingFields, vocab_size: int) -> dict[int, float]:
    """Return `logit_bias` by token id."""
    biases: dict[int, float] = {}
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS):
            shown = repr(key[:MAX_DIGITS])
            raise InvalidValue(f"logit_bias: {shown} is not a token id", "logit_bias")
        check_token_ids("logit_bias", [int(key)], vocab_size)
        if not -100 <= bias <= 100:
            raise InvalidValue(
                f"logit_bias: {bias} for {key} is not between -100 and 100", "logit_bias"
            )
        biases[int(key)] = bias
    return biases
