"""One answer made of embeddings, of one or more texts: the vectors, or how alike they are.

https://platform.openai.com/docs/api-reference/embeddings
"""

import base64
import math
from array import array
from collections.abc import Iterator
from typing import Any

from headrace.detokenizer_proc.renderers.json_slices import LazyList, slices
from headrace.detokenizer_proc.renderers.renderer import JSON
from headrace.detokenizer_proc.renderers.similarities import Similarities
from headrace.ipc.messages import EmbeddingPlan, SimilarityPlan, Times
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
            self._vectors[plan.index] = array("f", vector)

    def whole(self) -> Iterator[bytes]:
        """Return the body of the answer, complete now, in slices."""
        usage = EmbeddingUsage(prompt_tokens=self._num_tokens, total_tokens=self._num_tokens)
        if self._similarities is not None:
            return slices(self._similarities.body(usage))
        assert isinstance(self._plan, EmbeddingPlan)
        return slices(embedding_body(self._plan, self._vectors, usage))


def embedding_body(
    plan: EmbeddingPlan, vectors: "dict[int, array[float]]", usage: EmbeddingUsage
) -> Embedded:
    """Return the vectors in OpenAI's shape."""

    def form(index: int) -> EmbeddedText:
        numbers = shortened(vectors[index], plan.dimensions)
        form = base64.b64encode(numbers.tobytes()).decode() if plan.base64 else numbers.tolist()
        return EmbeddedText(object="embedding", index=index, embedding=form)

    data: Any = LazyList(range(len(vectors)), form)
    return Embedded(object="list", data=data, model=plan.model, usage=usage)


def shortened(vector: "array[float]", dimensions: int | None) -> "array[float]":
    """Return the first `dimensions` of a vector, of length 1 again (Matryoshka)."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    vector = vector[:dimensions]
    length = math.hypot(*vector) or 1.0
    return array("f", (number / length for number in vector))
