"""A generation request's body, made into the sequences it asks for."""

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import partial

import msgspec

from headrace import routes
from headrace.config.process_configs import ModelCard
from headrace.errors import ContextLengthExceeded, InvalidValue, Unsupported
from headrace.ipc.adapter_registry import AdapterRegistry
from headrace.ipc.messages import (
    AdapterSource,
    Api,
    GenerateForm,
    GenerateRequest,
    HttpRequest,
    Parsing,
    ReportedSampling,
    ResponsePlan,
    ResponsesForm,
    Sampling,
    detokenizer_of,
)
from headrace.response_bodies.tokens import InputTokens, TokenCount
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.encoding.infilling import LEAD, infilling_of
from headrace.tokenizer_proc.grammar.grammars import Grammars
from headrace.tokenizer_proc.grammar.thought_grammar import opening_of, thoughts_of
from headrace.tokenizer_proc.grammar.tool_grammar import demanded_calls, or_calls_of
from headrace.tokenizer_proc.images.images import Images, none_of
from headrace.tokenizer_proc.jobs.stages import (
    Body,
    Encoding,
    Handler,
    Ids,
    Sequences,
    Stages,
    Text,
    json_response,
)
from headrace.tokenizer_proc.logprob_limit import (
    check_logprobs,
    entries_of,
    num_entries,
    room_of,
)
from headrace.tokenizer_proc.output_parsing import parsing_of
from headrace.tokenizer_proc.prompts import (
    Prompts,
    PromptVocabulary,
    exceeds,
    key_of,
    last_tokens,
    public_id,
)
from headrace.tokenizer_proc.requests.anthropic import CHAT_NAMES as MESSAGES_NAMES
from headrace.tokenizer_proc.requests.anthropic import (
    chat_of_messages,
    decode_count,
    decode_messages,
)
from headrace.tokenizer_proc.requests.constraints import constraint_of
from headrace.tokenizer_proc.requests.field_names import as_written
from headrace.tokenizer_proc.requests.openai import (
    COMPLETION_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    decode_chat,
    decode_completion,
    decode_warm,
    prompt_list,
)
from headrace.tokenizer_proc.requests.responses import CHAT_NAMES as RESPONSES_NAMES
from headrace.tokenizer_proc.requests.responses import (
    chat_of_responses,
    decode_responses,
    echo_of,
)
from headrace.tokenizer_proc.requests.sampling import (
    MAX_SEQUENCES_PER_REQUEST,
    allowed_mask,
    bias_of,
    check_token_ids,
    default_parameters,
    parameters_of,
    stated,
)
from headrace.tokenizer_proc.requests.sglang import (
    GENERATE_MAX_TOKENS,
    continuations_of,
    decode_generate,
    form_of,
)

SEED_MASK = 2**64 - 1
SALT_BYTES = 16
# Of all sequences of a request: 128, each with 256 forms of words of 16 tokens.
MAX_BAD_WORD_TOKENS = 1 << 19
HOTTEST = 1e6  # a temperature at which all tokens are as likely; rows of steps hold it as f32
ID_PREFIXES = {
    Api.CHAT: "chatcmpl-",
    Api.COMPLETION: "cmpl-",
    Api.RESPONSES: "resp_",
    Api.MESSAGES: "msg_",
}

Generation = ChatRequest | CompletionRequest


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text to echo before the output."""

    ids: Ids
    echo: str = ""


@dataclass(frozen=True)
class Form:
    """In whose form a response goes, and what its request calls the prompt."""

    api: Api
    param: str
    default_max_tokens: int | None = None  # None is the model's, or all there is room for
    more: ResponsesForm | GenerateForm | None = None
    id: str = ""  # of the response; empty is a new one of that API
    first: int = 0  # index of the first sequence
    num_sequences: int | None = None  # of the whole response; None is those planned together
    num_logprobs: int = 0  # log probabilities of the sequences before


class GenerationPlanner:
    """Turns bodies into sequences, for one model."""

    def __init__(
        self,
        card: ModelCard,
        template: ChatTemplate,
        vocabulary: PromptVocabulary,
        num_detokenizers: int,
        seed: int,
        grammars: Grammars | None = None,
        images: Images | None = None,
        traces: bool = False,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """Plan for a model; with `traces` plans have the sampling parameters of spans."""
        self._traces = traces
        self._card = card
        self._parameters = default_parameters(card.sampling_defaults)
        self._template = template
        self._prompts = Prompts(card, vocabulary, adapters)
        self._num_detokenizers = num_detokenizers
        self._seed = seed
        self._grammars = grammars or Grammars(card)
        self._images_of = images.of if images else partial(none_of, card.takes_images)
        self._plans = msgspec.msgpack.Encoder()
        self._infilling = infilling_of(card.infill_token_ids, vocabulary.infill_tokens)

    @property
    def handlers(self) -> dict[str, Handler]:
        """The handler of each route that generates text, or counts its prompt's tokens."""
        return {
            routes.CHAT: self.chat,
            routes.COMPLETIONS: self.completion,
            routes.RESPONSES: self.responses,
            routes.INPUT_TOKENS: self.input_tokens,
            routes.MESSAGES: self.messages,
            routes.COUNT_TOKENS: self.count_tokens,
            routes.GENERATE: self.generate,
            routes.KV_WARM: self.warm,
        }

    def chat(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/chat/completions` request."""
        return (yield from self._chat(http, decode_chat(body), Form(Api.CHAT, "messages")))

    def responses(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/responses` request."""
        request = decode_responses(body)
        echo = echo_of(request, self._card.sampling_defaults)
        form = Form(Api.RESPONSES, "input", more=ResponsesForm(echo))
        with as_written(RESPONSES_NAMES):
            chat, names = chat_of_responses(request)
            with as_written(names):
                return (yield from self._chat(http, chat, form))

    def input_tokens(self, http: HttpRequest, body: Body) -> Stages:
        """Answer a `/v1/responses/input_tokens` request."""
        request = decode_responses(body)
        with as_written(RESPONSES_NAMES):
            chat, names = chat_of_responses(request)
            with as_written(names):
                num_tokens = yield from self._counted(http, chat)
        return json_response(InputTokens(object="response.input_tokens", input_tokens=num_tokens))

    def messages(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/messages` request."""
        request = decode_messages(body)
        with as_written(MESSAGES_NAMES):
            chat, names = chat_of_messages(request)
            with as_written(names):
                return (yield from self._chat(http, chat, Form(Api.MESSAGES, "messages")))

    def count_tokens(self, http: HttpRequest, body: Body) -> Stages:
        """Answer a `/v1/messages/count_tokens` request."""
        request = decode_count(body)
        with as_written(MESSAGES_NAMES):
            chat, names = chat_of_messages(request)
            with as_written(names):
                num_tokens = yield from self._counted(http, chat)
        return json_response(TokenCount(input_tokens=num_tokens))

    def _counted(self, http: HttpRequest, chat: ChatRequest) -> Encoding[int]:
        """Return how many tokens a conversation is."""
        self._prompts.check_model(chat.model)
        images = self._images_of(http.id, chat.messages, b"", chat.media_io_kwargs)
        (ids,) = yield [(yield from images.written(self._template.prompt(chat)))]
        return len(ids)

    def completion(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/completions` request."""
        request = decode_completion(body)
        form = Form(Api.COMPLETION, "prompt", COMPLETION_MAX_TOKENS)
        return (yield from self._continue(http, request, form))

    def warm(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/kv/warm` request: prompts are computed, and no token is generated."""
        request = decode_warm(body)
        if isinstance(request, ChatRequest):
            planned = yield from self._chat(http, request, Form(Api.CHAT, "messages"))
        else:
            form = Form(Api.COMPLETION, "prompt", COMPLETION_MAX_TOKENS)
            planned = yield from self._continue(http, request, form)
        ahead = [msgspec.structs.replace(one, max_tokens=0) for one in planned.requests]
        return dataclasses.replace(planned, requests=ahead)

    def generate(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/generate` request: each of its prompts may be continued in another way."""
        request = decode_generate(body)
        num_prompts, num_each = len(request.prompts), request.params[0].n
        check_number(num_prompts, num_each, request.prompt_name)
        parts = continuations_of(request)
        form = Form(
            Api.GENERATE,
            request.prompt_name,
            GENERATE_MAX_TOKENS,
            form_of(request, http.received_at),
            request.rid if request.rid and isinstance(request.rid, str) else public_id(http, 16),
            num_sequences=num_prompts * num_each,
        )
        planned = Sequences([], [])
        for part in parts:
            num_reported = num_entries(planned.requests, planned.prompts)
            following = dataclasses.replace(
                form, first=len(planned.requests), num_logprobs=num_reported
            )
            with as_written(part.names):
                found = yield from self._continue(http, part.request, following)
            planned = Sequences(planned.requests + found.requests, planned.prompts + found.prompts)
        return planned

    def _chat(self, http: HttpRequest, request: ChatRequest, form: Form) -> Encoding[Sequences]:
        """Plan the answers to a conversation."""
        self._prompts.check_model(request.model)
        salt = salt_of(request.cache_salt)
        images = self._images_of(http.id, request.messages, salt, request.media_io_kwargs)
        prompt = self._template.prompt(request)
        parsing = parsing_of(self._card, request, prompt.text)
        wanted = request.max_completion_tokens or request.max_tokens
        limit = self._prompts.kept(request.truncate_prompt_tokens, wanted)
        if limit is None:
            self._prompts.check_bytes(prompt.text, wanted, form.param)
        elif images:
            raise Unsupported(
                "truncate_prompt_tokens: images are not cut; leave it out, or the images",
                "truncate_prompt_tokens",
            )
        (ids,) = yield [(yield from images.written(prompt))]
        images.find(ids)
        cut = Prompt(last_tokens(ids, limit))
        planned = yield from self._plan(http, request, [cut], wanted, form, parsing)
        return images.sent(planned)

    def _continue(
        self, http: HttpRequest, request: CompletionRequest, form: Form
    ) -> Encoding[Sequences]:
        """Plan the continuations of prompts."""
        self._prompts.check_model(request.model)
        texts = prompt_list(request.prompt)
        check_number(len(texts), request.num_sequences, "n")
        wanted = request.max_tokens
        if request.suffix:
            prompts = yield from self._infilled(request, texts, form)
            return (yield from self._plan(http, request, prompts, wanted, form))
        room = stated(wanted, form.default_max_tokens)
        limit = self._prompts.kept(request.truncate_prompt_tokens, room)
        special, truncates = request.add_special_tokens is not False, limit is not None
        found = yield from self._prompts.encode(texts, form.param, wanted, truncates, special)
        pairs = zip(texts, found, strict=True)
        prompts = [self._prompt(request, text, ids, limit) for text, ids in pairs]
        return (yield from self._plan(http, request, prompts, wanted, form))

    def _infilled(
        self, request: CompletionRequest, texts: list[str | list[int]], form: Form
    ) -> Encoding[list[Prompt]]:
        """Return prompts, each with the request's suffix behind the place of the answer."""
        if self._infilling is None or request.suffix is None:
            raise Unsupported(
                "suffix: this model's vocabulary has no tokens to fill in the middle with", "suffix"
            )
        lead = LEAD if self._prompts.vocabulary.prepends_space else ""
        every = [*texts, lead + request.suffix, lead]
        *befores, led, leading = yield from self._prompts.encode(
            every, form.param, request.max_tokens, truncates=False, add_special_tokens=False
        )
        after = led[len(leading) :]
        begin = self._prompts.vocabulary.empty[: request.add_special_tokens is not False]
        return [Prompt(self._infilling.prompt(begin, before, after)) for before in befores]

    def _prompt(
        self, request: CompletionRequest, text: str | list[int], ids: Ids, limit: int | None
    ) -> Prompt:
        is_text = isinstance(text, str)
        ids = self._prompts.last_tokens(ids, limit) if is_text else last_tokens(ids, limit)
        if not request.echo:
            return Prompt(ids)
        is_whole_text = is_text and limit is None
        return Prompt(ids, str(text) if is_whole_text else self._prompts.vocabulary.decode(ids))

    def _plan(
        self,
        http: HttpRequest,
        request: Generation,
        prompts: list[Prompt],
        wanted: int | None,
        form: Form,
        parsing: Parsing | None = None,
    ) -> Encoding[Sequences]:
        num_each = request.num_sequences
        num_sequences = len(prompts) * num_each
        num_reported = form.num_sequences or num_sequences
        adapter = self._prompts.adapter_of(request.model)
        first = self._response_plan(http, request, form, num_reported, parsing)
        bad_words = (yield from self._bad_words(request.bad_words)) if request.bad_words else []
        check_bad_words(bad_words, num_sequences)
        sampling = self._sampling(http, request, bad_words)
        grammar = yield from self._grammar(request, parsing)
        if grammar and request.ignore_eos:
            sampling = without(sampling, self._card.eos_token_ids)
        response_plan, of_prompts, room = first, form.num_logprobs, None
        reports_logprobs = first.logprobs is not None or sampling.prompt_logprobs is not None
        if reports_logprobs:
            of_prompts += prompt_entries(sampling, first, prompts, num_each)
            response_plan = msgspec.structs.replace(first, echo=prompts[0].echo if prompts else "")
            room = room_of(response_plan, of_prompts, num_reported)
        ends = self._card.eos_token_ids if grammar else []  # a grammar may come to its end
        allowed = allowed_mask(request, self._card.vocab_size, ends)
        requests = []
        for position in range(num_sequences):
            prompt, index = prompts[position // num_each], form.first + position
            max_tokens = self._max_tokens(len(prompt.ids), wanted, form, room)
            check_min_tokens(request, max_tokens)
            plan = msgspec.structs.replace(
                first,
                num_prompt_tokens=len(prompt.ids),
                index=index,
                echo=prompt.echo,
                shares_prompt=position % num_each > 0,
                prompt_token_ids=bytes(prompt.ids) if request.return_token_ids else b"",
                num_delivered=http.num_delivered.get(index),
                is_suspect=http.is_response_suspect,
                sampling=reported(sampling, max_tokens, first.n) if self._traces else None,
            )
            requests.append(
                GenerateRequest(
                    id=http.id + index,
                    detokenizer=detokenizer_of(http.id, self._num_detokenizers),
                    max_tokens=max_tokens,
                    sampling=sampling_of(sampling, index, plan),
                    stop_token_ids=self._stop_token_ids(request, bool(grammar)),
                    plan=self._plans.encode(plan),
                    priority=request.priority or 0,
                    key=key_of(http, request.user, adapter),
                    salt=salt_of(request.cache_salt, adapter),
                    grammar=grammar,
                    resumes=http.resumes and http.resumes + index,
                    earlier=[id + index for id in http.earlier],
                    allowed=allowed,
                    adapter=adapter,
                )
            )
        if reports_logprobs:
            check_logprobs(response_plan, of_prompts, (request.max_tokens for request in requests))
        return Sequences(requests, [prompts[i // num_each].ids for i in range(len(requests))])

    def _response_plan(
        self,
        http: HttpRequest,
        request: Generation,
        form: Form,
        num_sequences: int,
        parsing: Parsing | None,
    ) -> ResponsePlan:
        """Return what the plans of all sequences of a request have in common."""
        options = request.stream_options
        include_usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        return ResponsePlan(
            response_id=form.id or ID_PREFIXES[form.api] + public_id(http, 12),
            model=request.model or self._card.name,
            created=int(http.received_at),
            api=form.api,
            stream=bool(request.stream),
            include_usage=include_usage,
            num_sequences=num_sequences,
            num_prompt_tokens=0,
            index=0,
            stop=request.stops,
            include_stop=request.includes_stop,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
            logprobs=request.num_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            best_of=request.num_sequences,
            n=request.n or 1,
            min_tokens=request.min_tokens or 0,
            continuous_usage=include_usage and continuous,
            return_token_ids=request.return_token_ids,
            request_id=http.request_id,
            parsing=parsing,
            form=form.more,
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            function_call=isinstance(request, ChatRequest) and request.functions is not None,
        )

    def _sampling(
        self, http: HttpRequest, request: Generation, bad_words: list[list[int]]
    ) -> Sampling:
        """Return how a request's tokens are chosen, with the seed of its first sequence."""
        num_logprobs = request.num_logprobs
        chooses = request.num_sequences > (request.n or 1)
        echoes = isinstance(request, CompletionRequest) and request.echo
        given = [request.prompt_logprobs, num_logprobs if echoes else None]
        of_prompt = max((num for num in given if num is not None), default=None)
        if of_prompt is not None and self._card.is_prefix_lm:
            why = "tokens of a prompt see later ones in this model"
            raise Unsupported(f"prompt_logprobs: not available, since {why}", "prompt_logprobs")
        numbers = parameters_of(request, self._parameters)
        numbers["temperature"] = min(numbers["temperature"], HOTTEST)
        numbers["top_k"] = min(max(numbers["top_k"], 0), self._card.vocab_size)
        return Sampling(
            **numbers,
            seed=(self._seed + http.first_id if request.seed is None else request.seed) & SEED_MASK,
            logit_bias=bias_of(request, self._card.vocab_size),
            bad_words=bad_words,
            min_tokens=request.min_tokens or 0,
            logprobs=0 if chooses and num_logprobs is None else num_logprobs,
            prompt_logprobs=of_prompt,
        )

    def _bad_words(self, words: list[str]) -> Encoding[list[list[int]]]:
        """Return each bad word as it is written at the start of a text, and after a space."""
        texts = [form for word in words for form in (word.lstrip(), " " + word.lstrip())]
        found = yield [Text(text, add_special_tokens=False) for text in texts]
        distinct = {tuple(ids): None for ids in found if len(ids)}
        return [list(ids) for ids in distinct]

    def _max_tokens(self, num_prompt: int, wanted: int | None, form: Form, room: int | None) -> int:
        """Return how many tokens a sequence may get: as asked, else the default, else all left.

        Where nothing is asked there are at most `room`; None is no limit.
        """
        if num_prompt == 0:
            raise InvalidValue(f"{form.param}: must have at least one token", form.param)
        limit = self._card.max_model_len
        if exceeds(num_prompt, wanted, limit):
            raise ContextLengthExceeded(num_prompt, wanted, limit, form.param)
        left = limit - num_prompt
        default = form.default_max_tokens or self._card.sampling_defaults.max_new_tokens
        asked = min(default or left, left if room is None else room)
        return min(stated(wanted, asked), left)

    def _grammar(self, request: Generation, parsing: Parsing | None) -> Encoding[bytes]:
        """Return the grammar a request's texts have to follow, or nothing."""
        constraint, special = constraint_of(request), self._prompts.vocabulary.special_tokens
        if isinstance(request, ChatRequest) and parsing is not None and request.offered:
            if request.demanded:  # what the text has to be is set aside for the call
                constraint = demanded_calls(request.demanded, parsing, special)
            elif constraint is not None:
                constraint = or_calls_of(request.offered, constraint, parsing, special)
        if constraint is None:
            return b""
        param, wanted = constraint
        if wanted.kind == "structural_tag":
            wanted = msgspec.structs.replace(wanted, special_tokens=dict(special))
        if parsing is not None:
            is_call = isinstance(request, ChatRequest) and bool(request.demanded)
            wanted = msgspec.structs.replace(
                wanted,
                thoughts=thoughts_of(parsing, special),
                opening="" if is_call else opening_of(parsing, special),
            )
        return (yield from self._grammars.compiled(param, wanted))

    def _stop_token_ids(self, request: Generation, has_grammar: bool) -> list[int]:
        """Return what ends a text. EOS does at the end of a grammar, ignored or not."""
        stops = request.stop_token_ids or []
        check_token_ids("stop_token_ids", stops, self._card.vocab_size)
        ignores = request.ignore_eos and not has_grammar
        eos = [] if ignores else self._card.eos_token_ids
        fills = isinstance(request, CompletionRequest) and bool(request.suffix) and not ignores
        ends = self._infilling.ends if self._infilling is not None and fills else []
        return list(dict.fromkeys([*eos, *ends, *stops]))


def prompt_entries(
    sampling: Sampling, plan: ResponsePlan, prompts: list[Prompt], num_each: int
) -> int:
    """Return the number of log probabilities reported for the prompts of all sequences."""
    num_looks = 1 if plan.chat else num_each
    num_tokens = sum(len(prompt.ids) for prompt in prompts)
    return num_looks * entries_of(num_tokens, sampling.prompt_logprobs)


def sampling_of(sampling: Sampling, index: int, plan: ResponsePlan) -> Sampling:
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


def check_bad_words(words: list[list[int]], num_sequences: int) -> None:
    """Refuse bad words of too many tokens: each sequence carries them."""
    total = num_sequences * sum(map(len, words))
    if total > MAX_BAD_WORD_TOKENS:
        raise InvalidValue(
            f"bad_words: {total} tokens of all sequences are more than {MAX_BAD_WORD_TOKENS} in "
            "one request; ask for fewer sequences, or for fewer or shorter words",
            "bad_words",
        )


def check_min_tokens(request: Generation, max_tokens: int) -> None:
    """Refuse to generate more than there may be."""
    if (request.min_tokens or 0) > max_tokens:
        raise InvalidValue(
            f"min_tokens: must be at most {max_tokens}, the limit of the answer's tokens, not "
            f"{request.min_tokens}",
            "min_tokens",
        )


def salt_of(cache_salt: str | None, adapter: AdapterSource | None = None) -> bytes:
    """Return a digest of what keys and values depend on beside the tokens.

    Every sequence carries it, so its size must not be the client's.
    """
    of_adapter = b"" if adapter is None else adapter.digest
    if not cache_salt:
        return of_adapter
    return hashlib.blake2b(of_adapter + cache_salt.encode(), digest_size=SALT_BYTES).digest()


def reported(sampling: Sampling, max_tokens: int, n: int) -> ReportedSampling:
    """Return the sampling parameters of a span."""
    return ReportedSampling(max_tokens, sampling.temperature, sampling.top_p, n)
