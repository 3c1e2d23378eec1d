"""SGLang's `/generate` as a struct, and the continuations it comes to.

What these mean is known in `openai.py`; here is only how SGLang writes it.
https://docs.sglang.ai/basic_usage/sampling_params.html
"""

from typing import Any, NamedTuple

import msgspec

from headrace.errors import InvalidValue
from headrace.ipc.messages import GenerateForm
from headrace.model.sampling_parameters import SamplingParameters
from headrace.tokenizer_proc.requests.field_names import as_written, refuse
from headrace.tokenizer_proc.requests.openai import (
    BodyDecoder,
    CompletionRequest,
    check_completion,
    check_not_empty,
)
from headrace.tokenizer_proc.requests.sampling import StreamOptions, check_length, check_ranges

GENERATE_MAX_TOKENS = 128  # SGLang's default
MAX_ID_LENGTH = 128  # characters of a `rid`: each sequence carries those of all
UNSUPPORTED = (
    "image_data",
    "audio_data",
    "input_embeds",
    "token_ids_logprob",
    "custom_logit_processor",
    "return_hidden_states",
)
# Fields that are one for all prompts, or a list with one for each.
BY_PROMPT = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "lora_path",
)


class SglangSamplingParams(SamplingParameters, kw_only=True):
    """`sampling_params`."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stop_regex: str | list[str] | None = None
    custom_params: Any = None


# The fields of a continuation that come from these, by their names here.
TAKEN = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
} | {
    name: name
    for name in SglangSamplingParams.__struct_fields__
    if name in CompletionRequest.__struct_fields__
}


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of `/generate`: texts or token ids, one prompt or several."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SglangSamplingParams | list[SglangSamplingParams] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    priority: int | None = None
    image_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    token_ids_logprob: Any = None
    lora_path: str | list[str | None] | None = None  # the name of an adapter
    custom_logit_processor: Any = None
    return_hidden_states: bool | None = None

    @property
    def prompt_name(self) -> str:
        """The field that has the prompts."""
        return "input_ids" if self.text is None else "text"

    @property
    def is_batch(self) -> bool:
        """Whether the prompts are a list, be it of one."""
        if self.text is not None:
            return isinstance(self.text, list)
        return not self.input_ids or isinstance(self.input_ids[0], list)

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each text or token ids."""
        found: Any = self.input_ids if self.text is None else self.text
        return found if self.is_batch else [found]

    @property
    def params(self) -> list[SglangSamplingParams]:
        """Those of each prompt, or the ones of all."""
        found = self.sampling_params or SglangSamplingParams()
        return found if isinstance(found, list) else [found]

    @property
    def differs(self) -> bool:
        """Whether each prompt may be continued in another way."""
        return any(isinstance(getattr(self, name), list) for name in BY_PROMPT)

    def given(self, name: str, index: int) -> Any:
        """Return a field's value for one prompt, from a single value or a list."""
        value = getattr(self, name)
        return value[index] if isinstance(value, list) else value

    def num_logprobs(self, index: int) -> int | None:
        """Number of likeliest tokens reported per prompt token; None without log probabilities."""
        wants = self.given("return_logprob", index)
        return (self.given("top_logprobs_num", index) or 0) if wants else None

    def first_logprob(self, index: int) -> int | None:
        """First prompt token with log probabilities; None without them."""
        start = self.given("logprob_start_len", index)
        wants = self.given("return_logprob", index) and start is not None and start >= 0
        return start if wants else None


class Continuations(NamedTuple):
    """Prompts that are continued in the same way."""

    request: CompletionRequest
    names: dict[str, str]  # of its fields, as the client wrote them


GENERATE = BodyDecoder(GenerateBody)


def decode_generate(body: bytes | memoryview) -> GenerateBody:
    """Decode and check the body of `/generate`, but for what its prompts share with others."""
    request: GenerateBody = GENERATE.decode(body)
    check_ranges(request)
    refuse(request, UNSUPPORTED)
    if (request.text is None) == (request.input_ids is None):
        raise InvalidValue("text: there must be either 'text' or 'input_ids'", "text")
    check_not_empty(request.prompts, request.prompt_name)
    if len({type(one) for one in request.input_ids or ()}) > 1:
        raise InvalidValue(
            "input_ids: must be a list of token ids, or a list of lists of token ids", "input_ids"
        )
    for name in (*BY_PROMPT, "rid"):
        given = getattr(request, name)
        if isinstance(given, list) and (len(given) != len(request.prompts) or not request.is_batch):
            raise InvalidValue(f"{name}: must be one, or a list with one for each prompt", name)
    ids = request.rid if isinstance(request.rid, list) else [request.rid or ""]
    check_length("rid", max(map(len, ids), default=0), MAX_ID_LENGTH)
    check_alike(request.params)
    return request


def check_alike(params: list[SglangSamplingParams]) -> None:
    """Refuse prompts that are not answered in the same form."""
    if len({one.n for one in params}) > 1:
        raise InvalidValue("sampling_params: must have the same 'n' for all", "sampling_params")


def continuations_of(request: GenerateBody) -> list[Continuations]:
    """Return what a request comes to: one for all its prompts, or one for each.

    Raises:
        RequestError: it asks for what there is not.
    """
    if not request.differs:
        return [continuations(request, request.prompts, 0)]
    return [continuations(request, [prompt], i) for i, prompt in enumerate(request.prompts)]


def continuations(request: GenerateBody, prompts: list[Any], index: int) -> Continuations:
    """Return the continuations of some prompts, with the fields of the `index`-th."""
    is_list = isinstance(request.sampling_params, list)
    params: SglangSamplingParams = request.given("sampling_params", index) or SglangSamplingParams()
    where = f"sampling_params[{index}]" if is_list else "sampling_params"
    names = {name: f"{where}.{name}" for name in SglangSamplingParams.__struct_fields__}
    names |= {ours: f"{where}.{name}" for name, ours in TAKEN.items()}
    names |= {
        "model": "lora_path",
        "prompt": request.prompt_name,
        "logprobs": "top_logprobs_num",
        "prompt_logprobs": "logprob_start_len",
    }
    num_logprobs = request.num_logprobs(index)
    reports_prompt = request.first_logprob(index) is not None
    with as_written(names):
        check_ranges(params)
        found = CompletionRequest(
            model=request.given("lora_path", index),
            prompt=prompts,
            stream=request.stream,
            stream_options=StreamOptions(True, True) if request.stream else None,
            logprobs=num_logprobs,
            prompt_logprobs=num_logprobs if reports_prompt else None,
            priority=request.priority,
            return_token_ids=True,
        )
        for name, ours in TAKEN.items():
            setattr(found, ours, getattr(params, name))
        check_completion(found)
    return Continuations(found, names)


def form_of(request: GenerateBody, received_at: float) -> GenerateForm:
    """Return how a request is to be answered; `received_at` is in seconds since the epoch."""
    params = request.params[0]
    reported = range(len(request.prompts) if request.differs else 1)
    return GenerateForm(
        is_list=request.is_batch or params.n > 1,
        received_at=received_at,
        ids=request.rid if isinstance(request.rid, list) else [],
        num_each=params.n,
        tells_token_text=request.return_text_in_logprobs,
        num_logprobs=[request.num_logprobs(index) for index in reported],
        first_logprob=[request.first_logprob(index) for index in reported],
    )
