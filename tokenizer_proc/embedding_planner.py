"""Bodies of requests that embed or compare texts, converted to sequences."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec

from headrace import routes
from headrace.config.process_configs import ModelCard
from headrace.errors import ContextLengthExceeded, InvalidValue, Unsupported
from headrace.ipc.messages import (
    EmbeddingPlan,
    GenerateRequest,
    HttpRequest,
    Sampling,
    SimilarityPlan,
    detokenizer_of,
)
from headrace.tokenizer_proc.encoding.chat_template import PROBE, ChatTemplate
from headrace.tokenizer_proc.encoding.pairs import pair
from headrace.tokenizer_proc.jobs.stages import (
    Body,
    Encoding,
    Handler,
    Ids,
    Sequences,
    Stages,
    Text,
)
from headrace.tokenizer_proc.prompts import (
    Prompts,
    PromptVocabulary,
    joined,
    key_of,
    public_id,
)
from headrace.tokenizer_proc.requests.cohere import (
    EMBED_NAMES,
    decode_cohere_embed,
    decode_cohere_rerank,
    embedding_of,
    prompt_of,
    ranking_of,
)
from headrace.tokenizer_proc.requests.field_names import as_written
from headrace.tokenizer_proc.requests.jina import check_jina, task_prompt, types_of
from headrace.tokenizer_proc.requests.openai import (
    MAX_EMBEDDING_INPUTS,
    EmbeddingRequest,
    decode_embedding,
    prompt_list,
)
from headrace.tokenizer_proc.requests.rerank import (
    RerankRequest,
    ScoreRequest,
    decode_rerank,
    decode_score,
    text_list,
)
from headrace.tokenizer_proc.requests.sampling import check_length

Embedded = EmbeddingRequest | RerankRequest | ScoreRequest


class EmbeddingPlanner:
    """Turns bodies into sequences, for one model."""

    def __init__(
        self,
        card: ModelCard,
        template: ChatTemplate,
        vocabulary: PromptVocabulary,
        num_detokenizers: int,
    ) -> None:
        self._card = card
        self._template = template
        self._prompts = Prompts(card, vocabulary)
        self._num_detokenizers = num_detokenizers
        self._plans = msgspec.msgpack.Encoder()

    @property
    def handlers(self) -> dict[str, Handler]:
        """The handler of each route of vectors and scores."""
        return {
            routes.EMBEDDINGS: self.embedding,
            routes.COHERE_EMBED: self.cohere_embed,
            routes.COHERE_EMBED_V1: partial(self.cohere_embed, version=1),
            routes.RERANK: self.rerank,
            routes.COHERE_RERANK: self.cohere_rerank,
            routes.SCORE: self.score,
        }

    @property
    def _written_prompts(self) -> Mapping[str, str]:
        """What the model's files have to write before texts, by kind."""
        return {} if self._card.pooling is None else self._card.pooling.prompts

    def embedding(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/embeddings` request."""
        request = decode_embedding(body)
        check_jina(request)
        plan = msgspec.structs.replace(self._embedding_plan(request), types=types_of(request))
        before = task_prompt(request.task, self._written_prompts)
        if before and not all(isinstance(text, str) for text in prompt_list(request.input)):
            raise InvalidValue(
                "task: its prompt goes before texts, and an input is token ids; send texts, or "
                "leave it out",
                "task",
            )
        return (yield from self._embed(http, request, plan, before))

    def cohere_embed(self, http: HttpRequest, body: Body, version: Literal[1, 2] = 2) -> Stages:
        """Plan a `/v1/embed` or `/v2/embed` request."""
        wanted = decode_cohere_embed(body)
        with as_written(EMBED_NAMES):
            request = embedding_of(wanted)
            plan = msgspec.structs.replace(
                self._embedding_plan(request),
                types=wanted.embedding_types or (["float"] if version == 2 else []),
                cohere=version,
                response_id=f"embed-{public_id(http, 12)}",
            )
            prompt = prompt_of(wanted, self._written_prompts)
            return (yield from self._embed(http, request, plan, prompt))

    def _embed(
        self, http: HttpRequest, request: EmbeddingRequest, plan: EmbeddingPlan, before: str = ""
    ) -> Stages:
        """Plan the sequences of texts, whose plans are `plan` in what they have in common.

        Args:
            before: is written before each text.
        """
        self._prompts.check_model(request.model, embeds=True)
        self._check_dimensions(request.dimensions)
        texts = prompt_list(request.input)
        check_length("input", len(texts), MAX_EMBEDDING_INPUTS)
        written = [before + text if isinstance(text, str) else text for text in texts]
        prompts = yield from self._embedded(request, written, "input")
        plans = [
            msgspec.structs.replace(
                plan,
                num_sequences=len(prompts),
                num_prompt_tokens=len(prompt),
                index=index,
                text=text if plan.cohere and isinstance(text, str) else "",
            )
            for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]
        return self._embedding_sequences(http, request, prompts, plans)

    def rerank(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/rerank` request."""
        return (yield from self._rank(http, decode_rerank(body), is_cohere=False))

    def cohere_rerank(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v2/rerank` request."""
        return (yield from self._rank(http, ranking_of(decode_cohere_rerank(body)), is_cohere=True))

    def _rank(self, http: HttpRequest, request: RerankRequest, is_cohere: bool) -> Stages:
        texts = request.texts
        plan = self._similarity_plan(http, "rerank")
        plan = msgspec.structs.replace(
            plan, ranks=True, top_n=request.top_n or 0, is_cohere=is_cohere
        )
        returned = [] if request.return_documents is False else texts["documents"]
        return (yield from self._compare(http, request, plan, texts, returned))

    def score(self, http: HttpRequest, body: Body) -> Stages:
        """Plan a `/v1/score` request."""
        request = decode_score(body)
        plan = self._similarity_plan(http, "score")
        texts = {"text_1": text_list(request.text_1), "text_2": text_list(request.text_2)}
        return (yield from self._compare(http, request, plan, texts, []))

    def _similarity_plan(self, http: HttpRequest, kind: str) -> SimilarityPlan:
        """Return what the plans of a request that compares have in common."""
        return SimilarityPlan(
            response_id=f"{kind}-{public_id(http, 12)}",
            model=self._card.name,
            created=int(http.received_at),
            num_sequences=0,
            num_prompt_tokens=0,
            index=0,
            num_queries=0,
            ranks=False,
        )

    def _compare(
        self,
        http: HttpRequest,
        request: RerankRequest | ScoreRequest,
        plan: SimilarityPlan,
        texts: dict[str, list[str]],
        returned: list[str],
    ) -> Stages:
        """Plan the sequences of queries and of documents, which `texts` has by field."""
        self._prompts.check_model(request.model, embeds=True, compares=True)
        if self._card.compares:
            return (yield from self._compare_pairs(http, request, plan, texts, returned))
        prompts: list[Ids] = []
        for param, some in texts.items():
            prompts += yield from self._embedded(request, some, param)
        (num_queries, num_documents) = map(len, texts.values())
        documents: list[str | None] = [None] * num_queries
        documents += returned or [None] * num_documents
        plan = msgspec.structs.replace(plan, num_queries=num_queries)
        return self._embedding_sequences(http, request, prompts, each(plan, prompts, documents))

    def _compare_pairs(
        self,
        http: HttpRequest,
        request: RerankRequest | ScoreRequest,
        plan: SimilarityPlan,
        texts: dict[str, list[str]],
        returned: list[str],
    ) -> Stages:
        """Plan a sequence for each query and document, of both."""
        if self._template.compares_pairs:
            return (yield from self._compare_prompted(http, request, plan, texts, returned))
        limit = self._prompts.kept(request.truncate_prompt_tokens, 0)
        encoded: list[list[Ids]] = []
        for param, some in texts.items():
            if limit is None:
                for text in some:
                    self._prompts.check_bytes(text, 0, param)
            encoded.append((yield [Text(text, add_special_tokens=False) for text in some]))
        queries, documents = encoded
        documents = [ids[: request.max_tokens_per_doc] for ids in documents]
        queries *= len(documents) // len(queries)
        marks = self._prompts.vocabulary.pair_marks()
        pairs = [pair(marks, *both, limit) for both in zip(queries, documents, strict=True)]
        param = next(reversed(texts))
        prompts = [self._shortened(one.ids, None, param) for one in pairs]
        plans = each(plan, prompts, returned or [None] * len(prompts))
        sequences = self._embedding_sequences(http, request, prompts, plans)
        seconds = [
            msgspec.structs.replace(request, second_text=one.second_text)
            for request, one in zip(sequences.requests, pairs, strict=True)
        ]
        return Sequences(seconds, prompts)

    def _compare_prompted(
        self,
        http: HttpRequest,
        request: RerankRequest | ScoreRequest,
        plan: SimilarityPlan,
        texts: dict[str, list[str]],
        returned: list[str],
    ) -> Stages:
        """Plan a prompt of the model's own template for each query and document.

        What is too long loses the end of its document: the prompt's end stays.
        """
        if request.max_tokens_per_doc is not None:
            raise Unsupported(
                "max_tokens_per_doc: this model's template prompts it with each document; use "
                "truncate_prompt_tokens",
                "max_tokens_per_doc",
            )
        queries, documents = texts.values()
        queries = queries * (len(documents) // len(queries))
        rendered = map(self._template.render_pair, queries, documents)
        found = yield [self._template.to_encode(text) for text in rendered]
        limit = self._prompts.kept(request.truncate_prompt_tokens, 0)
        if limit is not None:
            end = self._template.render_pair(PROBE, PROBE).rpartition(PROBE)[2]
            (kept,) = yield [Text(end, add_special_tokens=False)]
            found = [truncated_before(ids, kept, limit) for ids in found]
        param = next(reversed(texts))
        prompts = [self._shortened(ids, None, param) for ids in found]
        plans = each(plan, prompts, returned or [None] * len(prompts))
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
                detokenizer=detokenizer_of(http.id, self._num_detokenizers),
                max_tokens=1,
                sampling=Sampling(),
                stop_token_ids=[],
                plan=self._plans.encode(plan),
                priority=request.priority or 0,
                key=key_of(http, request.user),
                embeds=True,
                resumes=http.resumes and http.resumes + index,
                earlier=[id + index for id in http.earlier],
            )
            for index, plan in enumerate(plans)
        ]
        return Sequences(requests, prompts)

    def _embedding_plan(self, request: EmbeddingRequest) -> EmbeddingPlan:
        """Return what the plans of a request that embeds have in common."""
        return EmbeddingPlan(
            model=self._card.name,
            num_sequences=0,
            num_prompt_tokens=0,
            index=0,
            base64=request.encoding_format == "base64",
            dimensions=request.dimensions,
            normalizes=request.normalized,
        )

    def _check_dimensions(self, dimensions: int | None) -> None:
        size = self._card.embedding_size
        if dimensions is not None and size is not None and not 1 <= dimensions <= size:
            raise InvalidValue(
                f"dimensions: must be between 1 and {size}, not {dimensions}", "dimensions"
            )

    def _embedded(
        self, request: Embedded, texts: Sequence[str | list[int]], param: str
    ) -> Encoding[list[Ids]]:
        """Return the ids of texts to embed; a truncated text keeps its final special token."""
        limit = self._prompts.kept(request.truncate_prompt_tokens, 0)
        if not isinstance(request, EmbeddingRequest) and param == "documents":
            limit = lesser(limit, request.max_tokens_per_doc)
        found = yield from self._prompts.encode(texts, param, 0, truncates=limit is not None)
        if isinstance(request, EmbeddingRequest) and request.truncation_side == "left":
            found = [self._prompts.last_tokens(ids, limit) for ids in found]
        return [self._shortened(ids, limit, param) for ids in found]

    def _shortened(self, ids: Ids, limit: int | None, param: str) -> Ids:
        if limit is not None and len(ids) > limit:
            ends = self._prompts.vocabulary.empty[-1:]
            ids = joined(ids[: limit - 1], ends) if ends == ids[-1:] else ids[:limit]
        if not ids:
            raise InvalidValue(f"{param}: must have at least one token", param)
        if len(ids) > self._card.max_model_len:
            raise ContextLengthExceeded(len(ids), 0, self._card.max_model_len, param)
        return ids


def lesser(*limits: int | None) -> int | None:
    """Return the least limit; None is no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def truncated_before(ids: Ids, end: Ids, limit: int) -> Ids:
    """Return at most `limit` tokens of a prompt: what is left out lies before its end."""
    if len(ids) <= limit:
        return ids
    return joined(ids[: limit - len(end)], end) if len(end) < limit else ids[:limit]


def each(
    plan: SimilarityPlan, prompts: list[Ids], documents: Sequence[str | None]
) -> list[SimilarityPlan]:
    """Return the plan of each sequence; a document is included if it is returned."""
    return [
        msgspec.structs.replace(
            plan,
            num_sequences=len(prompts),
            num_prompt_tokens=len(prompt),
            index=index,
            document=document,
        )
        for index, (prompt, document) in enumerate(zip(prompts, documents, strict=True))
    ]
