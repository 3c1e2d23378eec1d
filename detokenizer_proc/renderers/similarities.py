"""Similarity scores in the shapes of vLLM's `/v1/score` and `/v1/rerank`, and of Cohere's
`/v2/rerank`: cosines of embeddings, or scores of a cross-encoder."""

import math
import operator
from array import array
from typing import Any

from msgspec import UNSET

from headrace.detokenizer_proc.renderers.json_slices import LazyList
from headrace.ipc.messages import SimilarityPlan
from headrace.response_bodies.cohere import BilledUnits, CohereRanking, meta_of
from headrace.response_bodies.embeddings import EmbeddingUsage
from headrace.response_bodies.scores import (
    RerankDocument,
    RerankResponse,
    RerankResult,
    ScoreData,
    ScoreResponse,
)

SEARCHED = 100  # documents of a search unit, Cohere's


class Similarities:
    """The scores of a request's documents.

    Each is computed when both of its vectors have come, so no step leaves the work of all of them.
    """

    def __init__(self, plan: SimilarityPlan) -> None:
        self._plan = plan
        self._scores = [0.0] * (plan.num_sequences - plan.num_queries)
        self._texts: list[str | None] = [None] * len(self._scores)
        self._queries: dict[int, list[float]] = {}
        self._early: dict[int, list[float]] = {}  # documents that came before their queries

    def take(self, plan: SimilarityPlan, vector: "array[float]") -> None:
        """Add a text's embedding, or a pair's score."""
        num_queries = plan.num_queries
        document = plan.index - num_queries
        if document >= 0:
            self._texts[document] = plan.document
        if not num_queries:
            (self._scores[document],) = vector
        elif document >= 0:
            self._early[document] = unit(vector)
            self._compare(document)
        else:
            self._queries[plan.index] = unit(vector)
            for early in range(plan.index, len(self._scores), num_queries):
                if early in self._early:
                    self._compare(early)

    def _compare(self, document: int) -> None:
        """Compute the cosine of a document that is here, if its query is."""
        query = self._queries.get(document % self._plan.num_queries)
        if query is not None:
            self._scores[document] = sum(map(operator.mul, query, self._early.pop(document)))

    def body(self, usage: EmbeddingUsage) -> RerankResponse | ScoreResponse | CohereRanking:
        """Return the response. Ranked documents are best first; equal ones keep their order."""
        plan = self._plan
        if plan.ranks:
            order = sorted(range(len(self._scores)), key=lambda index: -self._scores[index])
            order = order[: plan.top_n or None]
            results: Any = LazyList(order, self._rank)
            if plan.is_cohere:
                units = BilledUnits(search_units=math.ceil(len(self._scores) / SEARCHED))
                meta = meta_of(2, units)
                return CohereRanking(id=plan.response_id, results=results, meta=meta)
            return RerankResponse(
                id=plan.response_id,
                created=plan.created,
                model=plan.model,
                results=results,
                usage=usage,
            )
        data: Any = LazyList(range(len(self._scores)), self._score)
        return ScoreResponse(
            id=plan.response_id,
            created=plan.created,
            model=plan.model,
            object="list",
            data=data,
            usage=usage,
        )

    def _score(self, index: int) -> ScoreData:
        return ScoreData(index=index, object="score", score=self._scores[index])

    def _rank(self, index: int) -> RerankResult:
        text = self._texts[index]
        document = UNSET if text is None else RerankDocument(text=text)
        score = self._scores[index]
        return RerankResult(index=index, relevance_score=score, document=document)


def unit(vector: "array[float]") -> list[float]:
    """Return a vector with length 1; a zero vector stays as it is."""
    length = math.hypot(*vector) or 1.0
    return [number / length for number in vector]
