"""Similarity scores in the shapes of vLLM's `/v1/rerank` and `/v1/score`."""

from typing import Literal

from msgspec import UNSET, UnsetType

from headrace.response_bodies.base import Whole
from headrace.response_bodies.embeddings import EmbeddingUsage


class RerankDocument(Whole):
    """A text that was ranked."""

    text: str


class RerankResult(Whole):
    """Similarity of a document to the query: a cosine, or a cross-encoder's score."""

    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankResponse(Whole):
    """Response of `/v1/rerank`, the best document first."""

    id: str
    created: int
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class ScoreData(Whole):
    """Similarity of two texts: the cosine of embeddings, or a cross-encoder's score."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(Whole):
    """Response of `/v1/score`, in the order of the texts."""

    id: str
    created: int
    model: str
    object: Literal["list"]
    data: list[ScoreData]
    usage: EmbeddingUsage
