"""The bodies of requests that compare texts, and their validation.

As vLLM serves them: `/v1/rerank` in Jina's and Cohere's shape, `/v1/score` in its own.
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

import msgspec

from headrace.errors import InvalidValue, Unsupported
from headrace.tokenizer_proc.requests.openai import (
    MAX_EMBEDDING_INPUTS,
    BodyDecoder,
    check_not_empty,
)
from headrace.tokenizer_proc.requests.sampling import check_length, check_ranges


class Document(msgspec.Struct):
    """A text as Jina and Cohere wrap it."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/rerank`. `top_n` of 0 or null is all documents.

    `rank_fields` and `max_chunks_per_doc` are Cohere's, of its first API. A document is one chunk,
    so that any maximum is kept.
    """

    query: str | Document
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    rank_fields: list[str] | None = None
    max_chunks_per_doc: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    max_tokens_per_doc: int | None = None
    priority: int | None = None

    @property
    def texts(self) -> dict[str, list[str]]:
        """The query's text and the documents', by field."""
        fields = {"query": [self.query], "documents": self.documents}
        return {
            name: [one if isinstance(one, str) else one.text for one in some]
            for name, some in fields.items()
        }


class ScoreRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/score`: one text beside one or many, or as many beside as many."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    max_tokens_per_doc: int | None = None
    priority: int | None = None


RERANK = BodyDecoder(RerankRequest)
SCORE = BodyDecoder(ScoreRequest)


def decode_rerank(body: bytes | memoryview) -> RerankRequest:
    """Decode and check the body of `/v1/rerank`."""
    request: RerankRequest = RERANK.decode(body)
    return check_rerank(request)


def check_rerank(request: RerankRequest) -> RerankRequest:
    """Return a request to order texts, which has been checked."""
    check_ranges(request)
    check_not_empty(request.documents, "documents")
    check_length("documents", len(request.documents), MAX_EMBEDDING_INPUTS - 1)
    has_fields = any(isinstance(document, Document) for document in request.documents)
    if has_fields and request.rank_fields not in (None, ["text"]):
        raise Unsupported(
            "rank_fields: a document is ranked by its 'text'; join its fields there", "rank_fields"
        )
    return request


def decode_score(body: bytes | memoryview) -> ScoreRequest:
    """Decode and check the body of `/v1/score`."""
    request: ScoreRequest = SCORE.decode(body)
    check_ranges(request)
    first, second = text_list(request.text_1), text_list(request.text_2)
    check_not_empty(first, "text_1")
    check_not_empty(second, "text_2")
    check_length("text_2", len(second), MAX_EMBEDDING_INPUTS // 2)
    if len(first) not in (1, len(second)):
        raise InvalidValue(
            f"text_1: must have one text, or as many as text_2, {len(second)}, not {len(first)}",
            "text_1",
        )
    return request


def text_list(texts: str | list[str]) -> list[str]:
    """Return one text or several as a list."""
    return [texts] if isinstance(texts, str) else texts
