"""How alike texts are, in the shapes of vLLM's `/v1/score` and `/v1/rerank`: the cosines of their
embeddings, or what a cross-encoder says."""

import math
import operator
from array import array
from typing import Any

from headrace.messages import SimilarityPlan

Object = dict[str, Any]


def similarity_body(plans: list[SimilarityPlan], vectors: "list[array[float]]") -> Object:
    """Return a request's answer, but for its usage; queries come first, then documents."""
    plan = plans[0]
    first = plan.num_queries
    found = cosines(vectors, first) if first else [score for (score,) in vectors]
    body: Object = {"id": plan.response_id, "created": plan.created, "model": plan.model}
    if plan.ranks:
        return body | {"results": ranks(plans[first:], found)}
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(found)]
    return body | {"object": "list", "data": data}


def cosines(vectors: "list[array[float]]", num_queries: int) -> list[float]:
    """Return how alike each document is to its query, or to the only one."""
    units = list(map(unit, vectors))
    queries, documents = units[:num_queries], units[num_queries:]
    pairs = zip(queries * (len(documents) // num_queries), documents, strict=True)
    return [sum(map(operator.mul, one, other)) for one, other in pairs]


def ranks(plans: list[SimilarityPlan], scores: list[float]) -> list[Object]:
    """Return the documents, the likest first; of equals the one that came first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in order[: plans[0].top_n or None]:
        result: Object = {"index": index, "relevance_score": scores[index]}
        document = plans[index].document
        if document is not None:
            result["document"] = {"text": document}
        results.append(result)
    return results


def unit(vector: "array[float]") -> list[float]:
    """Return a vector with length 1; a zero vector stays as it is."""
    length = math.hypot(*vector) or 1.0
    return [number / length for number in vector]
