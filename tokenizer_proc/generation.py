"""A generation request's body, made into the sequences it asks for."""

import secrets
from array import array
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.config import ModelCard
from headrace.errors import ContextLengthExceeded, InvalidValue, ModelNotFound
from headrace.messages import GenerateRequest, HttpRequest, ReplyPlan, Sampling
from headrace.tokenizer_proc.chat import ChatTemplate
from headrace.tokenizer_proc.openai_requests import (
    COMPLETION_MAX_TOKENS,
    MAX_SEQUENCES_PER_REQUEST,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    decode_chat,
    decode_completion,
    stop_strings,
)

SEED_MASK = 2**64 - 1


class Encodes(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> "array[int]": ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text to echo before what is generated."""

    ids: "array[int]"  # u32
    echo: str = ""


@dataclass(frozen=True)
class Sequences:
    """What goes to the engine: one message and one prompt per sequence."""

    requests: list[GenerateRequest]
    prompts: list["array[int]"]


class GenerationPlanner:
    """Turns bodies into sequences, for one model."""

    def __init__(self, card: ModelCard, encoder: Encodes, num_detokenizers: int, seed: int) -> None:
        self._card = card
        self._encoder = encoder
        self._template = ChatTemplate(card.chat_template, card.special_tokens)
        self._num_detokenizers = num_detokenizers
        self._seed = seed
        self._plans = msgspec.msgpack.Encoder()

    def chat(self, http: HttpRequest, body: bytes | memoryview) -> Sequences:
        """Plan a `/v1/chat/completions` request."""
        request = decode_chat(body)
        self._check_model(request)
        ids = self._encoder.encode(self._template.render(request), add_special_tokens=False)
        wanted = request.max_completion_tokens or request.max_tokens
        return self._plan(http, request, [Prompt(ids)], wanted, None, "messages")

    def completion(self, http: HttpRequest, body: bytes | memoryview) -> Sequences:
        """Plan a `/v1/completions` request."""
        request = decode_completion(body)
        self._check_model(request)
        prompts = [self._prompt(p, request.echo) for p in prompt_list(request)]
        default = COMPLETION_MAX_TOKENS
        return self._plan(http, request, prompts, request.max_tokens, default, "prompt")

    def _check_model(self, request: SamplingFields) -> None:
        if request.model is not None and request.model != self._card.name:
            raise ModelNotFound(request.model, self._card.name)

    def _prompt(self, prompt: str | list[int], echo: bool) -> Prompt:
        if isinstance(prompt, str):
            ids = self._encoder.encode(prompt, add_special_tokens=True)
            return Prompt(ids, prompt if echo else "")
        for id in prompt:
            if not 0 <= id < self._card.vocab_size:
                raise InvalidValue(
                    f"prompt: {id} is not a token id; they go from 0 to "
                    f"{self._card.vocab_size - 1}",
                    "prompt",
                )
        return Prompt(array("I", prompt), self._encoder.decode(prompt) if echo else "")

    def _plan(
        self,
        http: HttpRequest,
        request: SamplingFields,
        prompts: list[Prompt],
        wanted: int | None,
        default: int | None,
        param: str,
    ) -> Sequences:
        n = request.n or 1
        if len(prompts) * n > MAX_SEQUENCES_PER_REQUEST:
            raise InvalidValue(
                f"n: {len(prompts)} prompts x n={n} is more than {MAX_SEQUENCES_PER_REQUEST} "
                "sequences in one request",
                "n",
            )
        chat = isinstance(request, ChatRequest)
        kind = "chatcmpl" if chat else "cmpl"
        response_id = f"{kind}-{secrets.token_hex(12)}"
        seed = self._seed + http.id if request.seed is None else request.seed
        requests = []
        for index in range(len(prompts) * n):
            prompt = prompts[index // n]
            plan = ReplyPlan(
                response_id=response_id,
                model=self._card.name,
                created=int(http.received_at),
                chat=chat,
                stream=bool(request.stream),
                include_usage=bool(request.stream_options and request.stream_options.include_usage),
                num_sequences=len(prompts) * n,
                num_prompt_tokens=len(prompt.ids),
                index=index,
                stop=stop_strings(request),
                include_stop=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
                echo=prompt.echo,
                shares_prompt=index % n > 0,
            )
            requests.append(
                GenerateRequest(
                    id=http.id + index,
                    detokenizer=(http.id >> 16) % self._num_detokenizers,
                    max_tokens=self._max_tokens(len(prompt.ids), wanted, default, param),
                    sampling=Sampling(
                        temperature=1.0 if request.temperature is None else request.temperature,
                        top_p=1.0 if request.top_p is None else request.top_p,
                        top_k=min(max(request.top_k or 0, 0), self._card.vocab_size),
                        seed=(seed + index) & SEED_MASK,
                    ),
                    stop_token_ids=self._stop_token_ids(request),
                    plan=self._plans.encode(plan),
                )
            )
        return Sequences(requests, [prompts[i // n].ids for i in range(len(requests))])

    def _max_tokens(
        self, num_prompt: int, wanted: int | None, default: int | None, param: str
    ) -> int:
        """Return how many tokens a sequence may get: as asked, else the default, else all left."""
        if num_prompt == 0:
            raise InvalidValue(f"{param}: must have at least one token", param)
        left = self._card.max_model_len - num_prompt
        if left < (wanted or 1):
            raise ContextLengthExceeded(num_prompt, wanted, self._card.max_model_len, param)
        return wanted or min(default or left, left)

    def _stop_token_ids(self, request: SamplingFields) -> list[int]:
        eos = [] if request.ignore_eos else self._card.eos_token_ids
        return [*eos, *(request.stop_token_ids or ())]


def prompt_list(request: CompletionRequest) -> list[str] | list[list[int]]:
    """Return the prompts of a request as a list of prompts, each text or token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]  # a list that starts with an id is all ids
    return prompt  # type: ignore[return-value]
