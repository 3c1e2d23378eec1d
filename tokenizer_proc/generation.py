"""A generation request's body, made into the sequences it asks for."""

import hashlib
import secrets
from dataclasses import dataclass

import msgspec

from headrace.config import ModelCard
from headrace.errors import ContextLengthExceeded, InvalidValue
from headrace.messages import (
    Api,
    GenerateRequest,
    HttpRequest,
    Parsing,
    ReplyPlan,
    Sampling,
)
from headrace.tokenizer_proc.chat import ChatTemplate
from headrace.tokenizer_proc.grammar_fields import constraint_of
from headrace.tokenizer_proc.grammars import Grammars
from headrace.tokenizer_proc.openai_requests import (
    COMPLETION_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    decode_chat,
    decode_completion,
    prompt_list,
)
from headrace.tokenizer_proc.parsing import parsing_of
from headrace.tokenizer_proc.prompts import (
    Prompts,
    Vocabulary,
    detokenizer_of,
    exceeds,
    key_of,
    last_tokens,
)
from headrace.tokenizer_proc.sampling_fields import (
    MAX_SEQUENCES_PER_REQUEST,
    bias_of,
    check_token_ids,
)
from headrace.tokenizer_proc.stages import Body, Encoding, Ids, Sequences, Stages, Text
from headrace.tokenizer_proc.tool_grammar import demanded_calls

SEED_MASK = 2**64 - 1
SALT_BYTES = 16

Generation = ChatRequest | CompletionRequest


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text to echo before what is generated."""

    ids: Ids
    echo: str = ""


class GenerationPlanner:
    """Turns bodies into sequences, for one model."""

    def __init__(
        self,
        card: ModelCard,
        template: ChatTemplate,
        vocabulary: Vocabulary,
        num_detokenizers: int,
        seed: int,
        grammars: Grammars | None = None,
    ) -> None:
        self._card = card
        self._template = template
        self._prompts = Prompts(card, vocabulary)
        self._num_detokenizers = num_detokenizers
        self._seed = seed
        self._grammars = grammars or Grammars(card)
        self._plans = msgspec.msgpack.Encoder()

    def chat(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/chat/completions` request."""
        request = decode_chat(body)
        self._prompts.check_model(request.model)
        text = self._template.render(request)
        parsing = parsing_of(self._card, request, text)
        wanted = request.max_completion_tokens or request.max_tokens
        limit = request.truncate_prompt_tokens
        if limit is None:
            self._prompts.check_bytes(text, wanted, "messages")
        (ids,) = yield [Text(text, add_special_tokens=False)]
        prompt = Prompt(last_tokens(ids, limit))
        return (yield from self._plan(http, request, [prompt], wanted, None, "messages", parsing))

    def completion(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/completions` request."""
        request = decode_completion(body)
        self._prompts.check_model(request.model)
        texts = prompt_list(request.prompt)
        check_number(len(texts), request.num_sequences, "n")
        limit, wanted = request.truncate_prompt_tokens, request.max_tokens
        found = yield from self._prompts.encode(
            texts, "prompt", wanted, truncates=limit is not None
        )
        prompts = [self._prompt(request, *pair) for pair in zip(texts, found, strict=True)]
        default = COMPLETION_MAX_TOKENS
        return (yield from self._plan(http, request, prompts, wanted, default, "prompt"))

    def _prompt(self, request: CompletionRequest, text: str | list[int], ids: Ids) -> Prompt:
        limit = request.truncate_prompt_tokens
        ids = (
            self._prompts.last_tokens(ids, limit)
            if isinstance(text, str)
            else last_tokens(ids, limit)
        )
        if not request.echo:
            return Prompt(ids)
        is_whole_text = isinstance(text, str) and limit is None
        return Prompt(ids, str(text) if is_whole_text else self._prompts.vocabulary.decode(ids))

    def _plan(
        self,
        http: HttpRequest,
        request: Generation,
        prompts: list[Prompt],
        wanted: int | None,
        default: int | None,
        param: str,
        parsing: Parsing | None = None,
    ) -> Encoding[Sequences]:
        num_each = request.num_sequences
        first = self._reply_plan(http, request, len(prompts) * num_each, parsing)
        bad_words = (yield from self._bad_words(request.bad_words)) if request.bad_words else []
        sampling = self._sampling(http, request, bad_words)
        grammar = yield from self._grammar(request, parsing)
        if grammar and request.ignore_eos:
            sampling = without(sampling, self._card.eos_token_ids)
        requests = []
        for index in range(len(prompts) * num_each):
            prompt = prompts[index // num_each]
            plan = msgspec.structs.replace(
                first,
                num_prompt_tokens=len(prompt.ids),
                index=index,
                echo=prompt.echo,
                shares_prompt=index % num_each > 0,
                prompt_token_ids=bytes(prompt.ids) if request.return_token_ids else b"",
            )
            max_tokens = self._max_tokens(len(prompt.ids), wanted, default, param)
            check_min_tokens(request, max_tokens)
            requests.append(
                GenerateRequest(
                    id=http.id + index,
                    detokenizer=detokenizer_of(http, self._num_detokenizers),
                    max_tokens=max_tokens,
                    sampling=sampling_of(sampling, index, plan),
                    stop_token_ids=self._stop_token_ids(request, bool(grammar)),
                    plan=self._plans.encode(plan),
                    priority=request.priority or 0,
                    key=key_of(http, request.user),
                    salt=salt_of(request.cache_salt),
                    grammar=grammar,
                )
            )
        return Sequences(requests, [prompts[i // num_each].ids for i in range(len(requests))])

    def _reply_plan(
        self,
        http: HttpRequest,
        request: Generation,
        num_sequences: int,
        parsing: Parsing | None,
    ) -> ReplyPlan:
        """Return what the plans of all sequences of a request have in common."""
        chat = isinstance(request, ChatRequest)
        options = request.stream_options
        include_usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        return ReplyPlan(
            response_id=f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            model=self._card.name,
            created=int(http.received_at),
            api=Api.CHAT if chat else Api.COMPLETION,
            stream=bool(request.stream),
            include_usage=include_usage,
            num_sequences=num_sequences,
            num_prompt_tokens=0,
            index=0,
            stop=request.stops,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
            logprobs=request.num_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            best_of=request.num_sequences,
            n=request.n or 1,
            min_tokens=request.min_tokens or 0,
            continuous_usage=include_usage and continuous,
            return_token_ids=request.return_token_ids,
            parsing=parsing,
        )

    def _sampling(
        self, http: HttpRequest, request: Generation, bad_words: list[list[int]]
    ) -> Sampling:
        """Return how a request's tokens are chosen, with the seed of its first sequence."""
        num_logprobs = request.num_logprobs
        chooses = request.num_sequences > (request.n or 1)
        echoes = isinstance(request, CompletionRequest) and request.echo
        of_prompt = [request.prompt_logprobs, num_logprobs if echoes else None]
        return Sampling(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=min(max(request.top_k or 0, 0), self._card.vocab_size),
            min_p=request.min_p or 0.0,
            seed=(self._seed + http.id if request.seed is None else request.seed) & SEED_MASK,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            logit_bias=bias_of(request, self._card.vocab_size),
            bad_words=bad_words,
            min_tokens=request.min_tokens or 0,
            logprobs=0 if chooses and num_logprobs is None else num_logprobs,
            prompt_logprobs=max((num for num in of_prompt if num is not None), default=None),
        )

    def _bad_words(self, words: list[str]) -> Encoding[list[list[int]]]:
        """Return each bad word as it is written at the start of a text, and after a space."""
        texts = [form for word in words for form in (word.lstrip(), " " + word.lstrip())]
        found = yield [Text(text, add_special_tokens=False) for text in texts]
        distinct = {tuple(ids): None for ids in found if len(ids)}
        return [list(ids) for ids in distinct]

    def _max_tokens(
        self, num_prompt: int, wanted: int | None, default: int | None, param: str
    ) -> int:
        """Return how many tokens a sequence may get: as asked, else the default, else all left."""
        if num_prompt == 0:
            raise InvalidValue(f"{param}: must have at least one token", param)
        limit = self._card.max_model_len
        if exceeds(num_prompt, wanted, limit):
            raise ContextLengthExceeded(num_prompt, wanted, limit, param)
        left = limit - num_prompt
        return wanted or min(default or left, left)

    def _grammar(self, request: Generation, parsing: Parsing | None) -> Encoding[bytes]:
        """Return the grammar a request's texts have to follow, or nothing."""
        constraint = constraint_of(request)
        if isinstance(request, ChatRequest) and parsing is not None and request.demanded:
            if constraint is not None:
                raise InvalidValue(
                    f"{constraint[0]}: not together with a 'tool_choice' that demands a call",
                    constraint[0],
                )
            special = self._prompts.vocabulary.special_tokens
            constraint = demanded_calls(request.demanded, parsing, special)
        return b"" if constraint is None else (yield from self._grammars.compiled(*constraint))

    def _stop_token_ids(self, request: Generation, has_grammar: bool) -> list[int]:
        """Return what ends a text. EOS does at the end of a grammar, ignored or not."""
        stops = request.stop_token_ids or []
        check_token_ids("stop_token_ids", stops, self._card.vocab_size)
        ignores = request.ignore_eos and not has_grammar
        eos = [] if ignores else self._card.eos_token_ids
        return [*eos, *stops]


def sampling_of(sampling: Sampling, index: int, plan: ReplyPlan) -> Sampling:
    """Return how the `index`-th sequence is sampled.

    The prompt of a chat is looked at once: its logprobs belong to the answer, not to a choice.
    """
    watches = not (plan.chat and plan.shares_prompt)
    return msgspec.structs.replace(
        sampling,
        seed=(sampling.seed + index) & SEED_MASK,
        prompt_logprobs=sampling.prompt_logprobs if watches else None,
    )


def without(sampling: Sampling, tokens: list[int]) -> Sampling:
    """Return `sampling` with `tokens` banned: they come only where a grammar allows no others."""
    bias = sampling.logit_bias | dict.fromkeys(tokens, float("-inf"))
    return msgspec.structs.replace(sampling, logit_bias=bias)


def check_number(num_prompts: int, num_each: int, param: str) -> None:
    """Refuse a request of too many sequences."""
    if num_prompts * num_each > MAX_SEQUENCES_PER_REQUEST:
        what = f"{num_prompts} prompts x {num_each}" if num_each > 1 else f"{num_prompts} prompts"
        raise InvalidValue(
            f"{param}: {what} is more than {MAX_SEQUENCES_PER_REQUEST} sequences in one request",
            param,
        )


def check_min_tokens(request: Generation, max_tokens: int) -> None:
    """Refuse to generate more than there may be."""
    if (request.min_tokens or 0) > max_tokens:
        raise InvalidValue(
            f"min_tokens: must be at most max_tokens, {max_tokens}, not {request.min_tokens}",
            "min_tokens",
        )


def salt_of(cache_salt: str | None) -> bytes:
    """Return a salt's digest: every sequence carries it, so its size must not be the client's."""
    if not cache_salt:
        return b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=SALT_BYTES).digest()
