"""The bodies of Cohere's `/v1/embed`, `/v2/embed` and `/v2/rerank`, as the requests they come to.

https://docs.cohere.com/reference/embed, https://docs.cohere.com/reference/rerank. `input_type`
chooses one of the prompts that a model's files have.
"""

import itertools
from collections.abc import Mapping
from typing import Literal

import msgspec

from headrace.errors import InvalidValue, Unsupported
from headrace.ipc.messages import EmbeddingType
from headrace.tokenizer_proc.requests.openai import (
    BodyDecoder,
    EmbeddingRequest,
    TextInput,
    check_not_empty,
)
from headrace.tokenizer_proc.requests.rerank import RerankRequest, check_rerank
from headrace.tokenizer_proc.requests.sampling import check_ranges

# Prompts of each `input_type`, as the files of models name them: the first there is counts.
PROMPT_NAMES = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "search_document"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
ALL_THERE_IS_ROOM_FOR = -1  # of `truncate_prompt_tokens`
# What an embedding request's fields are called here.
EMBED_NAMES = {
    "input": "texts",
    "dimensions": "output_dimension",
    "truncate_prompt_tokens": "max_tokens",
}


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    """A part of an input."""

    text: str


class ImageContent(msgspec.Struct, tag_field="type", tag="image_url"):
    """A part that no model here embeds."""


class CohereInput(msgspec.Struct):
    """An input of parts: their texts are one."""

    content: list[TextContent | ImageContent]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/embed` and `/v2/embed`: either `texts` or `inputs`."""

    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    images: list[str] | None = None
    model: str | None = None
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering", "image"] | None
    ) = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = None
    priority: int | None = None


class CohereRerankRequest(msgspec.Struct, kw_only=True):
    """The body of `/v2/rerank`."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    rank_fields: list[str] | None = None
    max_chunks_per_doc: int | None = None
    max_tokens_per_doc: int | None = None
    priority: int | None = None


EMBED = BodyDecoder(CohereEmbedRequest)
RERANK = BodyDecoder(CohereRerankRequest)


def decode_cohere_embed(body: bytes | memoryview) -> CohereEmbedRequest:
    """Decode the body of `/v1/embed` or `/v2/embed`."""
    request: CohereEmbedRequest = EMBED.decode(body)
    if request.embedding_types is not None:
        check_not_empty(request.embedding_types, "embedding_types")
    return request


def decode_cohere_rerank(body: bytes | memoryview) -> CohereRerankRequest:
    """Decode the body of `/v2/rerank`."""
    request: CohereRerankRequest = RERANK.decode(body)
    return request


def embedding_of(request: CohereEmbedRequest) -> EmbeddingRequest:
    """Return the embedding request that one of Cohere's comes to."""
    texts: list[str | TextInput] = [*texts_of(request)]
    check_not_empty(texts, "input")
    limit = None if request.truncate == "NONE" else ALL_THERE_IS_ROOM_FOR
    embedding = EmbeddingRequest(
        input=texts,
        model=request.model,
        dimensions=request.output_dimension,
        truncate_prompt_tokens=limit if request.max_tokens is None else request.max_tokens,
        truncation_side="left" if request.truncate == "START" else "right",
        priority=request.priority,
    )
    check_ranges(embedding)
    return embedding


def prompt_of(request: CohereEmbedRequest, prompts: Mapping[str, str]) -> str:
    """Return what is written before each text; "" where the model has nothing for its kind."""
    names = PROMPT_NAMES.get(request.input_type or "", ())
    return next((prompts[name] for name in names if name in prompts), "")


def texts_of(request: CohereEmbedRequest) -> list[str]:
    """Return the texts to embed."""
    parts = [one.content for one in request.inputs or ()]
    if request.images or any(isinstance(p, ImageContent) for p in itertools.chain(*parts)):
        name = "images" if request.images else "inputs"
        raise Unsupported(f"{name}: no model here embeds images; send texts", name)
    if (request.texts is None) == (request.inputs is None):
        raise InvalidValue("texts: there must be either 'texts' or 'inputs'", "texts")
    if request.texts is not None:
        return request.texts
    return ["".join(p.text for p in one if isinstance(p, TextContent)) for one in parts]


def ranking_of(request: CohereRerankRequest) -> RerankRequest:
    """Return the rerank request that one of Cohere's comes to; long documents lose their end."""
    ranking = RerankRequest(
        query=request.query,
        documents=[*request.documents],
        model=request.model,
        top_n=request.top_n,
        return_documents=bool(request.return_documents),
        rank_fields=request.rank_fields,
        max_chunks_per_doc=request.max_chunks_per_doc,
        truncate_prompt_tokens=ALL_THERE_IS_ROOM_FOR,
        max_tokens_per_doc=request.max_tokens_per_doc,
        priority=request.priority,
    )
    return check_rerank(ranking)
