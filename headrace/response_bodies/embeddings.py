"""OpenAI's embeddings: https://platform.openai.com/docs/api-reference/embeddings."""

from typing import Literal

from headrace.response_bodies.base import Whole


class EmbeddedText(Whole):
    """A text as a vector: numbers, bytes of bits, or in base64 little-endian f32."""

    object: Literal["embedding"]
    index: int
    embedding: str | list[float | int]


class EmbeddingUsage(Whole):
    """How many tokens the texts took."""

    prompt_tokens: int
    total_tokens: int


class Embedded(Whole):
    """What `/v1/embeddings` answers."""

    object: Literal["list"]
    data: list[EmbeddedText]
    model: str
    usage: EmbeddingUsage
