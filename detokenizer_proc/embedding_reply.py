"""One answer with embeddings, of one or more texts.

https://platform.openai.com/docs/api-reference/embeddings
"""

import base64
import math
from array import array
from typing import Any

import msgspec

from headrace.detokenizer_proc.openai_responses import JSON
from headrace.messages import EmbeddingPlan, Times


class EmbeddingReply:
    """Collects the vectors of a request."""

    content_type = JSON

    def __init__(self, plan: EmbeddingPlan) -> None:
        self._plan = plan
        self._vectors: dict[int, array[float]] = {}
        self._num_prompt_tokens = 0
        self.head_sent = False
        self.times: Times | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all texts have their vector."""
        return len(self._vectors) == self._plan.num_sequences

    def take(self, plan: EmbeddingPlan, vector: bytes) -> bytes:
        """Take a text's embedding, f32; return the bytes to write: all of them, with the last."""
        self._vectors[plan.index] = shortened(array("f", vector), plan.dimensions)
        self._num_prompt_tokens += plan.num_prompt_tokens
        if not self.is_complete:
            return b""
        num_tokens = self._num_prompt_tokens
        body: dict[str, Any] = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._form(vector)}
                for index, vector in sorted(self._vectors.items())
            ],
            "model": self._plan.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return msgspec.json.encode(body)

    def _form(self, vector: "array[float]") -> str | list[float]:
        if self._plan.base64:
            return base64.b64encode(vector.tobytes()).decode()
        return vector.tolist()


def shortened(vector: "array[float]", dimensions: int | None) -> "array[float]":
    """Return the first `dimensions` of a vector, of length 1 again (Matryoshka)."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    vector = vector[:dimensions]
    length = math.hypot(*vector) or 1.0
    return array("f", (number / length for number in vector))
