"""One answer made of embeddings, of one or more texts: the vectors, or how alike they are.

https://platform.openai.com/docs/api-reference/embeddings
"""

import base64
import math
from array import array
from typing import Any

import msgspec

from headrace.detokenizer_proc.renderer import JSON
from headrace.detokenizer_proc.similarities import similarity_body
from headrace.messages import EmbeddingPlan, SimilarityPlan, Times

VectorPlan = EmbeddingPlan | SimilarityPlan
Object = dict[str, Any]


class EmbeddingReply:
    """Collects the vectors of a request, whose plans are all of one kind."""

    content_type = JSON

    def __init__(self, plan: VectorPlan) -> None:
        self._num_sequences = plan.num_sequences
        self._found: dict[int, tuple[VectorPlan, array[float]]] = {}
        self.head_sent = False
        self.times: Times | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all texts have their vector."""
        return len(self._found) == self._num_sequences

    def take(self, plan: VectorPlan, vector: bytes) -> bytes:
        """Take a text's embedding, f32; return the bytes to write: all of them, with the last."""
        self._found[plan.index] = (plan, array("f", vector))
        if not self.is_complete:
            return b""
        found = [self._found[index] for index in sorted(self._found)]
        vectors = [vector for _, vector in found]
        if isinstance(plan, EmbeddingPlan):
            body = embedding_body(plan, vectors)
        else:
            body = similarity_body([p for p, _ in found if isinstance(p, SimilarityPlan)], vectors)
        num_tokens = sum(plan.num_prompt_tokens for plan, _ in found)
        body["usage"] = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return msgspec.json.encode(body)


def embedding_body(plan: EmbeddingPlan, vectors: "list[array[float]]") -> Object:
    """Return the vectors in OpenAI's shape, but for the usage."""
    data = []
    for index, vector in enumerate(vectors):
        numbers = shortened(vector, plan.dimensions)
        form = base64.b64encode(numbers.tobytes()).decode() if plan.base64 else numbers.tolist()
        data.append({"object": "embedding", "index": index, "embedding": form})
    return {"object": "list", "data": data, "model": plan.model}


def shortened(vector: "array[float]", dimensions: int | None) -> "array[float]":
    """Return the first `dimensions` of a vector, of length 1 again (Matryoshka)."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    vector = vector[:dimensions]
    length = math.hypot(*vector) or 1.0
    return array("f", (number / length for number in vector))
