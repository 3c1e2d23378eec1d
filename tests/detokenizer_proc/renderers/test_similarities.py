"""How alike texts are, from their embeddings."""

import json
from array import array
from typing import Any

import msgspec
import pytest

from headrace.detokenizer_proc.renderers.embedding_response import EmbeddingResponse
from headrace.ipc.messages import SimilarityPlan


def similarity(vectors: list[list[float]], **fields: Any) -> Any:
    """Return the answer of vectors that come in the reverse order."""
    plan = SimilarityPlan("x-1", "tiny", 5, len(vectors), 3, 0, num_queries=1, ranks=False)
    plan = msgspec.structs.replace(plan, **fields)
    response = EmbeddingResponse(plan)
    for index in reversed(range(len(vectors))):
        assert not response.is_complete
        document = None if plan.document is None or index == 0 else f"{plan.document} {index}"
        own = msgspec.structs.replace(plan, index=index, document=document)
        response.take(own, array("f", vectors[index]).tobytes())
    assert response.is_complete
    return json.loads(b"".join(response.whole()))


def test_scores_are_the_cosines_to_the_one_query() -> None:
    assert similarity([[2, 0], [0, 7], [3, 4], [0, 0]]) == {
        "id": "x-1",
        "created": 5,
        "model": "tiny",
        "object": "list",
        "data": [
            {"index": 0, "object": "score", "score": 0},
            {"index": 1, "object": "score", "score": pytest.approx(0.6)},
            {"index": 2, "object": "score", "score": 0},
        ],
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
    }


def test_as_many_queries_as_documents_are_scored_in_pairs() -> None:
    body = similarity([[1, 0], [0, 1], [-1, 0], [0, 5]], num_queries=2)
    assert [one["score"] for one in body["data"]] == [-1, 1]


def test_ranks_are_the_likest_documents() -> None:
    vectors: list[list[float]] = [[1, 0], [0, 1], [1, 0], [3, 4]]
    assert similarity(vectors, ranks=True, top_n=2, document="text")["results"] == [
        {"index": 1, "relevance_score": 1, "document": {"text": "text 2"}},
        {"index": 2, "relevance_score": pytest.approx(0.6), "document": {"text": "text 3"}},
    ]
    whole = similarity(vectors, ranks=True)["results"]
    assert [result["index"] for result in whole] == [1, 2, 0]
    assert all("document" not in result for result in whole)
