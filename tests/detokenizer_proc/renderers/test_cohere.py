"""Vectors and ranks in Cohere's shapes, and in Jina's types."""

import base64
import json
from array import array
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.detokenizer_proc.inflight_responses import error_body
from headrace.detokenizer_proc.renderers.embedding_response import EmbeddingResponse
from headrace.errors import QueueFull
from headrace.ipc.messages import EmbeddingPlan, EmbeddingType, Plan, SimilarityPlan

VECTORS = [[0.6, -0.8, 0.0, 0.25, -0.0, 1.0, -1.0, 0.5, 0.125], [2.0, -2.0] + [0.5] * 7]
META = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 6}}


def told(plan: EmbeddingPlan, *vectors: list[float]) -> Any:
    """Return the answer of vectors that come in the reverse order."""
    plan = msgspec.structs.replace(plan, num_sequences=len(vectors))
    response = EmbeddingResponse(plan)
    for index in reversed(range(len(vectors))):
        own = msgspec.structs.replace(plan, index=index, text=f"text {index}")
        response.take(own, array("f", vectors[index]).tobytes())
    return json.loads(b"".join(response.whole()))


def plan_of(*types: EmbeddingType, **fields: Any) -> EmbeddingPlan:
    return EmbeddingPlan("tiny", 0, 3, 0, base64=False, types=[*types], **fields)


def test_cohere_embeddings_have_each_type_that_was_asked_for() -> None:
    types: list[EmbeddingType] = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = told(plan_of(*types, cohere=2, response_id="embed-1"), *VECTORS)
    vectors = body.pop("embeddings")
    assert body == {
        "response_type": "embeddings_by_type",
        "id": "embed-1",
        "texts": ["text 0", "text 1"],
        "meta": META,
    }
    assert list(vectors) == types
    numbers = np.float32(VECTORS)
    np.testing.assert_array_equal(np.float32(vectors["float"]), numbers)
    eighths = np.clip(np.rint(numbers * 127), -128, 127)
    assert vectors["int8"] == eighths.tolist()
    assert vectors["uint8"] == (eighths + 128).tolist()
    bits = np.packbits(numbers > 0, axis=1).astype(int)
    assert vectors["ubinary"] == bits.tolist()
    assert vectors["binary"] == (bits - 128).tolist()
    assert base64.b64decode(vectors["base64"][1]) == numbers[1].tobytes()


def test_cohere_s_first_api_has_floats_alone() -> None:
    body = told(plan_of(cohere=1, response_id="embed-1"), [1.0, 0.5])
    assert body == {
        "response_type": "embeddings_floats",
        "id": "embed-1",
        "embeddings": [[1.0, 0.5]],
        "texts": ["text 0"],
        "meta": META | {"api_version": {"version": "1"}, "billed_units": {"input_tokens": 3}},
    }
    assert told(plan_of("int8", cohere=1), [1.0])["embeddings"] == {"int8": [[127]]}


def test_jina_s_type_is_that_of_openai_s_answer() -> None:
    body = told(plan_of("ubinary"), [1.0, -1.0, 1.0])
    assert body["data"] == [{"object": "embedding", "index": 0, "embedding": [0b10100000]}]


def test_vectors_are_normalized_where_that_is_asked() -> None:
    vector = [3.0, 4.0]
    for fields, expected in (({}, vector), ({"normalizes": True}, [0.6, 0.8])):
        embedding = told(plan_of(**fields), vector)["data"][0]["embedding"]
        assert embedding == pytest.approx(expected)


RANKS = SimilarityPlan("rerank-1", "tiny", 5, 102, 3, 0, 1, ranks=True, top_n=2, is_cohere=True)


@pytest.mark.parametrize(
    ("plan", "shape"),
    [
        (RANKS, ["message"]),
        (plan_of(cohere=1), ["message"]),
        (plan_of(cohere=2), ["message"]),
        (plan_of(), ["error", "detail"]),
        (msgspec.structs.replace(RANKS, is_cohere=False), ["error", "detail"]),
        (msgspec.structs.replace(RANKS, is_cohere=False, ranks=False), ["error"]),
        (None, ["error"]),
    ],
)
def test_errors_have_the_shape_of_their_api(plan: Plan | None, shape: list[str]) -> None:
    head, body = error_body(QueueFull(), plan)
    assert (head.status, list(json.loads(body))) == (429, shape)


def test_cohere_ranks_have_documents_that_are_returned() -> None:
    response = EmbeddingResponse(RANKS)
    for index in range(102):
        own = msgspec.structs.replace(
            RANKS, index=index, document=f"{index - 1}" if index else None
        )
        response.take(own, array("f", [1.0, 101.0 - index]).tobytes())
    results = json.loads(b"".join(response.whole()))["results"]
    assert [result["document"] for result in results] == [{"text": "0"}, {"text": "1"}]


def test_cohere_ranks_have_places_and_scores() -> None:
    plan = RANKS
    response = EmbeddingResponse(plan)
    for index in range(102):
        own = msgspec.structs.replace(plan, index=index)
        response.take(own, array("f", [1.0, 101.0 - index]).tobytes())
    body = json.loads(b"".join(response.whole()))
    assert [list(result) for result in body["results"]] == [["index", "relevance_score"]] * 2
    assert [result["index"] for result in body["results"]] == [0, 1]
    assert body["id"] == "rerank-1"
    assert body["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": 2}}
    assert body.keys() == {"id", "results", "meta"}
