"""One answer made of embeddings, of one or more texts: the vectors, or how alike they are.

https://platform.openai.com/docs/api-reference/embeddings, https://docs.cohere.com/reference/embed
"""

import math
from array import array
from collections.abc import Iterator
from typing import Any

from headrace.detokenizer_proc.renderers.json_slices import LazyList, slices
from headrace.detokenizer_proc.renderers.renderer import JSON
from headrace.detokenizer_proc.renderers.similarities import Similarities
from headrace.detokenizer_proc.renderers.vector_types import typed
from headrace.ipc.messages import EmbeddingPlan, EmbeddingType, SimilarityPlan, Times
from headrace.response_bodies.cohere import (
    BilledUnits,
    CohereEmbedded,
    CohereFloats,
    VectorsByType,
    meta_of,
)
from headrace.response_bodies.embeddings import Embedded, EmbeddedText, EmbeddingUsage

VectorPlan = EmbeddingPlan | SimilarityPlan


class EmbeddingResponse:
    """Collects the vectors of a request, whose plans are all of one kind."""

    content_type = JSON

    def __init__(self, plan: VectorPlan) -> None:
        self._plan = plan
        self._num_tokens = 0
        self._num_found = 0
        self._vectors: dict[int, array[float]] = {}
        self._texts: dict[int, str] = {}  # with Cohere's API
        self._similarities = Similarities(plan) if isinstance(plan, SimilarityPlan) else None
        self.times: Times | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all texts have their vector."""
        return self._num_found == self._plan.num_sequences

    @property
    def num_bytes(self) -> int:
        """Number of bytes of vectors in the response."""
        return sum(4 * len(vector) for vector in self._vectors.values())

    def take(self, plan: VectorPlan, vector: bytes) -> None:
        """Add a text's embedding, f32."""
        self._num_found += 1
        self._num_tokens += plan.num_prompt_tokens
        if self._similarities is not None and isinstance(plan, SimilarityPlan):
            self._similarities.take(plan, array("f", vector))
        else:
            assert isinstance(plan, EmbeddingPlan)
            self._vectors[plan.index] = array("f", vector)
            self._texts[plan.index] = plan.text

    def whole(self) -> Iterator[bytes]:
        """Return the body of the answer, complete now, in slices."""
        usage = EmbeddingUsage(prompt_tokens=self._num_tokens, total_tokens=self._num_tokens)
        if self._similarities is not None:
            return slices(self._similarities.body(usage))
        assert isinstance(self._plan, EmbeddingPlan)
        if self._plan.cohere:
            texts = [self._texts[index] for index in range(len(self._texts))]
            return slices(cohere_body(self._plan, self._vectors, texts, self._num_tokens))
        return slices(embedding_body(self._plan, self._vectors, usage))


def embedding_body(
    plan: EmbeddingPlan, vectors: "dict[int, array[float]]", usage: EmbeddingUsage
) -> Embedded:
    """Return the vectors in OpenAI's shape."""

    kind: EmbeddingType = "base64" if plan.base64 else "float"
    (kind,) = plan.types or [kind]

    def form(index: int) -> EmbeddedText:
        embedding = typed(finished(vectors[index], plan), kind)
        return EmbeddedText(object="embedding", index=index, embedding=embedding)

    data: Any = LazyList(range(len(vectors)), form)
    return Embedded(object="list", data=data, model=plan.model, usage=usage)


def cohere_body(
    plan: EmbeddingPlan, vectors: "dict[int, array[float]]", texts: list[str], num_tokens: int
) -> CohereFloats | CohereEmbedded:
    """Return the vectors in Cohere's shape."""

    def in_type(kind: EmbeddingType) -> Any:
        order = range(len(vectors))
        return LazyList(order, lambda index: typed(finished(vectors[index], plan), kind))

    assert plan.cohere
    common: dict[str, Any] = {
        "id": plan.response_id,
        "texts": texts,
        "meta": meta_of(plan.cohere, BilledUnits(input_tokens=num_tokens)),
    }
    if not plan.types:
        return CohereFloats(embeddings=in_type("float"), **common)
    fields = {"float_" if kind == "float" else kind: in_type(kind) for kind in plan.types}
    return CohereEmbedded(embeddings=VectorsByType(**fields), **common)


def finished(vector: "array[float]", plan: EmbeddingPlan) -> "array[float]":
    """Return the first `dimensions` of a vector, of length 1 again (Matryoshka)."""
    dimensions = plan.dimensions
    if dimensions is not None and dimensions < len(vector):
        vector = vector[:dimensions]
    elif not plan.normalizes:
        return vector
    length = math.hypot(*vector) or 1.0
    return array("f", (number / length for number in vector))
