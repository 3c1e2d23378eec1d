"""A generation request's body, made into the sequences it asks for."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.config import ModelCard
from headrace.errors import ContextLengthExceeded, InvalidValue, ModelNotFound, WrongKind
from headrace.messages import (
    SEQUENCE_BITS,
    Api,
    EmbeddingPlan,
    GenerateRequest,
    HttpRequest,
    ReplyPlan,
    Sampling,
    SimilarityPlan,
    share_key,
)
from headrace.tokenizer_proc.chat import ChatTemplate
from headrace.tokenizer_proc.openai_requests import (
    COMPLETION_MAX_TOKENS,
    MAX_EMBEDDING_INPUTS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    decode_chat,
    decode_completion,
    decode_embedding,
    prompt_list,
)
from headrace.tokenizer_proc.sampling_fields import (
    MAX_SEQUENCES_PER_REQUEST,
    bias_of,
    check_length,
    check_token_ids,
)
from headrace.tokenizer_proc.similarity_requests import (
    RerankRequest,
    ScoreRequest,
    decode_rerank,
    decode_score,
    text_list,
)
from headrace.tokenizer_proc.stages import Body, Encoding, Ids, Sequences, Stages, Text, ids_of
from headrace.tokenizer_proc.token_bytes import TokenBytes

SEED_MASK = 2**64 - 1
SALT_BYTES = 16

Generation = ChatRequest | CompletionRequest
Embedded = EmbeddingRequest | RerankRequest | ScoreRequest


class Vocabulary(Protocol):
    """What is needed of a tokenizer beside encoding."""

    empty: Ids  # the ids of a text without characters: the special tokens around every one
    token_bytes: TokenBytes | None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out."""
        ...


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
    ) -> None:
        self._card = card
        self._template = template
        self._vocabulary = vocabulary
        self._num_detokenizers = num_detokenizers
        self._seed = seed
        self._plans = msgspec.msgpack.Encoder()

    def chat(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/chat/completions` request."""
        request = decode_chat(body)
        self._check_model(request.model, embeds=False)
        text = self._template.render(request)
        wanted = request.max_completion_tokens or request.max_tokens
        limit = request.truncate_prompt_tokens
        if limit is None:
            self._check_bytes(text, wanted, "messages")
        (ids,) = yield [Text(text, add_special_tokens=False)]
        prompt = Prompt(last_tokens(ids, limit))
        return (yield from self._plan(http, request, [prompt], wanted, None, "messages"))

    def completion(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/completions` request."""
        request = decode_completion(body)
        self._check_model(request.model, embeds=False)
        texts = prompt_list(request.prompt)
        check_number(len(texts), request.num_sequences, "n")
        limit, wanted = request.truncate_prompt_tokens, request.max_tokens
        found = yield from self._encode(texts, "prompt", wanted, truncates=limit is not None)
        prompts = [self._prompt(request, *pair) for pair in zip(texts, found, strict=True)]
        default = COMPLETION_MAX_TOKENS
        return (yield from self._plan(http, request, prompts, wanted, default, "prompt"))

    def embedding(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/embeddings` request."""
        request = decode_embedding(body)
        self._check_model(request.model, embeds=True)
        self._check_dimensions(request.dimensions)
        texts = prompt_list(request.input)
        check_length("input", len(texts), MAX_EMBEDDING_INPUTS)
        prompts = yield from self._embedded(request, texts, "input")
        plans = [self._embedding_plan(request, prompts, index) for index in range(len(prompts))]
        return self._embedding_sequences(http, request, prompts, plans)

    def rerank(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/rerank` request."""
        request = decode_rerank(body)
        documents = request.texts
        plan = self._similarity_plan(http, "rerank")
        plan = msgspec.structs.replace(plan, ranks=True, top_n=request.top_n or 0)
        told = documents if request.return_documents else []
        texts = {"query": [request.query], "documents": documents}
        return (yield from self._compare(http, request, plan, texts, told))

    def score(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/score` request."""
        request = decode_score(body)
        plan = self._similarity_plan(http, "score")
        texts = {"text_1": text_list(request.text_1), "text_2": text_list(request.text_2)}
        return (yield from self._compare(http, request, plan, texts, []))

    def _similarity_plan(self, http: HttpRequest, kind: str) -> SimilarityPlan:
        """Return what the plans of a request that compares have in common."""
        return SimilarityPlan(
            response_id=f"{kind}-{secrets.token_hex(12)}",
            model=self._card.name,
            created=int(http.received_at),
            num_sequences=0,
            num_prompt_tokens=0,
            index=0,
            num_queries=1,
            ranks=False,
        )

    def _compare(
        self,
        http: HttpRequest,
        request: RerankRequest | ScoreRequest,
        plan: SimilarityPlan,
        texts: dict[str, list[str]],
        told: list[str],
    ) -> Stages:
        """Plan the sequences of queries and of documents, which `texts` has by field."""
        self._check_model(request.model, embeds=True)
        prompts: list[Ids] = []
        for param, some in texts.items():
            prompts += yield from self._embedded(request, some, param)
        (num_queries, num_documents) = map(len, texts.values())
        documents: list[str | None] = [None] * num_queries
        documents += told or [None] * num_documents
        plans = [
            msgspec.structs.replace(
                plan,
                num_sequences=len(prompts),
                num_prompt_tokens=len(prompt),
                index=index,
                num_queries=num_queries,
                document=document,
            )
            for index, (prompt, document) in enumerate(zip(prompts, documents, strict=True))
        ]
        return self._embedding_sequences(http, request, prompts, plans)

    def _embedding_sequences(
        self,
        http: HttpRequest,
        request: Embedded,
        prompts: list[Ids],
        plans: Sequence[EmbeddingPlan | SimilarityPlan],
    ) -> Sequences:
        requests = [
            GenerateRequest(
                id=http.id + index,
                detokenizer=self._detokenizer(http),
                max_tokens=1,
                sampling=Sampling(),
                stop_token_ids=[],
                plan=self._plans.encode(plan),
                priority=request.priority or 0,
                key=key_of(http, request.user),
                embeds=True,
            )
            for index, plan in enumerate(plans)
        ]
        return Sequences(requests, prompts)

    def _embedding_plan(
        self, request: EmbeddingRequest, prompts: list[Ids], index: int
    ) -> EmbeddingPlan:
        return EmbeddingPlan(
            model=self._card.name,
            num_sequences=len(prompts),
            num_prompt_tokens=len(prompts[index]),
            index=index,
            base64=request.encoding_format == "base64",
            dimensions=request.dimensions,
        )

    def _check_model(self, name: str | None, embeds: bool) -> None:
        if name is not None and name != self._card.name:
            raise ModelNotFound(name, self._card.name)
        if self._card.embeds and not embeds:
            raise WrongKind(f"'{self._card.name}' embeds and generates no text; see /v1/embeddings")
        if embeds and not self._card.embeds:
            raise WrongKind(f"'{self._card.name}' generates text and has no embeddings")

    def _check_dimensions(self, dimensions: int | None) -> None:
        size = self._card.embedding_size
        if dimensions is not None and size is not None and not 1 <= dimensions <= size:
            raise InvalidValue(
                f"dimensions: must be between 1 and {size}, not {dimensions}", "dimensions"
            )

    def _detokenizer(self, http: HttpRequest) -> int:
        return (http.id >> SEQUENCE_BITS) % self._num_detokenizers

    def _encode(
        self, texts: Sequence[str | list[int]], param: str, wanted: int | None, truncates: bool
    ) -> Encoding[list[Ids]]:
        """Return the ids of prompts that are texts or ids already."""
        strings = [text for text in texts if isinstance(text, str)]
        if not truncates:
            for string in strings:
                self._check_bytes(string, wanted, param)
        encoded = iter((yield [Text(string, add_special_tokens=True) for string in strings]))
        return [next(encoded) if isinstance(t, str) else self._given(t, param) for t in texts]

    def _given(self, ids: list[int], param: str) -> Ids:
        """Return a prompt that came as token ids."""
        check_token_ids(param, ids, self._card.vocab_size)
        return ids_of(ids)

    def _check_bytes(self, text: str, wanted: int | None, param: str) -> None:
        """Refuse a text that is too long however it is encoded."""
        limit, token_bytes = self._card.max_model_len, self._vocabulary.token_bytes
        if token_bytes is None or len(text) <= limit:
            return
        fewest = token_bytes.fewest_tokens(text)
        if exceeds(fewest, wanted, limit):
            raise ContextLengthExceeded(fewest, wanted, limit, param, is_estimate=True)

    def _prompt(self, request: CompletionRequest, text: str | list[int], ids: Ids) -> Prompt:
        limit = request.truncate_prompt_tokens
        ids = self._last_tokens(ids, limit) if isinstance(text, str) else last_tokens(ids, limit)
        if not request.echo:
            return Prompt(ids)
        is_whole_text = isinstance(text, str) and limit is None
        return Prompt(ids, str(text) if is_whole_text else self._vocabulary.decode(ids))

    def _last_tokens(self, ids: Ids, limit: int | None) -> Ids:
        """Return the end of a text; what is cut keeps the token that begins all texts."""
        begins = self._vocabulary.empty[:1]
        if limit is None or len(ids) <= limit or limit == 1 or begins != ids[:1]:
            return last_tokens(ids, limit)
        return joined(begins, last_tokens(ids, limit - 1))

    def _embedded(
        self, request: Embedded, texts: Sequence[str | list[int]], param: str
    ) -> Encoding[list[Ids]]:
        """Return what is embedded of texts; one that is cut keeps the token that ends them all."""
        limit = request.truncate_prompt_tokens
        found = yield from self._encode(texts, param, 0, truncates=limit is not None)
        return [self._shortened(ids, limit, param) for ids in found]

    def _shortened(self, ids: Ids, limit: int | None, param: str) -> Ids:
        if limit is not None and len(ids) > limit:
            ends = self._vocabulary.empty[-1:]
            ids = joined(ids[: limit - 1], ends) if ends == ids[-1:] else ids[:limit]
        if not ids:
            raise InvalidValue(f"{param}: must have at least one token", param)
        if len(ids) > self._card.max_model_len:
            raise ContextLengthExceeded(len(ids), 0, self._card.max_model_len, param)
        return ids

    def _plan(
        self,
        http: HttpRequest,
        request: Generation,
        prompts: list[Prompt],
        wanted: int | None,
        default: int | None,
        param: str,
    ) -> Encoding[Sequences]:
        num_each = request.num_sequences
        first = self._reply_plan(http, request, len(prompts) * num_each)
        bad_words = (yield from self._bad_words(request.bad_words)) if request.bad_words else []
        sampling = self._sampling(http, request, bad_words)
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
                    detokenizer=self._detokenizer(http),
                    max_tokens=max_tokens,
                    sampling=sampling_of(sampling, index, plan),
                    stop_token_ids=self._stop_token_ids(request),
                    plan=self._plans.encode(plan),
                    priority=request.priority or 0,
                    key=key_of(http, request.user),
                    salt=salt_of(request.cache_salt),
                )
            )
        return Sequences(requests, [prompts[i // num_each].ids for i in range(len(requests))])

    def _reply_plan(self, http: HttpRequest, request: Generation, num_sequences: int) -> ReplyPlan:
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

    def _stop_token_ids(self, request: Generation) -> list[int]:
        stops = request.stop_token_ids or []
        check_token_ids("stop_token_ids", stops, self._card.vocab_size)
        eos = [] if request.ignore_eos else self._card.eos_token_ids
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


def exceeds(num_prompt: int, wanted: int | None, limit: int) -> bool:
    """Whether a prompt and what is wanted pass the context; None wants one token at least."""
    return num_prompt + (1 if wanted is None else wanted) > limit


def last_tokens(ids: Ids, limit: int | None) -> Ids:
    """Return the last `limit` tokens of a prompt: what is generated follows its end."""
    return ids if limit is None else ids[-limit:]


def joined(first: Ids, second: Ids) -> Ids:
    """Return two parts of a prompt as one."""
    return memoryview(bytes(first) + bytes(second)).cast("I")


def key_of(http: HttpRequest, user: str | None) -> int:
    """Return whose share a request counts towards: its API key's, else its user's."""
    return share_key(user.encode()) if user and not http.key else http.key


def salt_of(cache_salt: str | None) -> bytes:
    """Return a salt's digest: every sequence carries it, so its size must not be the client's."""
    if not cache_salt:
        return b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=SALT_BYTES).digest()
