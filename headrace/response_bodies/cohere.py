"""Cohere's responses: https://docs.cohere.com/reference/embed and /rerank."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from headrace.response_bodies.base import Whole
from headrace.response_bodies.scores import RerankResult


class ApiVersion(Whole):
    """The version of Cohere's API."""

    version: str


class BilledUnits(Whole):
    """What Cohere would count: tokens of texts, or a hundred documents of a search."""

    input_tokens: int | UnsetType = UNSET
    search_units: int | UnsetType = UNSET


class CohereMeta(Whole):
    """What each response has."""

    api_version: ApiVersion
    billed_units: BilledUnits


class VectorsByType(Whole):
    """Vectors in the types that were asked for, in the order of the texts."""

    float_: list[list[float]] | UnsetType = msgspec.field(name="float", default=UNSET)
    int8: list[list[int]] | UnsetType = UNSET
    uint8: list[list[int]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class CohereFloats(Whole, tag_field="response_type", tag="embeddings_floats"):
    """Response of `/v1/embed` without `embedding_types`."""

    id: str
    embeddings: list[list[float]]
    texts: list[str]
    meta: CohereMeta


class CohereEmbedded(Whole, tag_field="response_type", tag="embeddings_by_type"):
    """Response of `/v2/embed`, and of `/v1/embed` with `embedding_types`."""

    id: str
    embeddings: VectorsByType
    texts: list[str]
    meta: CohereMeta


class CohereRanking(Whole):
    """Response of `/v2/rerank`, the best document first."""

    id: str
    results: list[RerankResult]
    meta: CohereMeta


def meta_of(version: Literal[1, 2], units: BilledUnits) -> CohereMeta:
    """Return the `meta` of a response."""
    return CohereMeta(api_version=ApiVersion(version=str(version)), billed_units=units)
