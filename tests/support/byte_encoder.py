"""A tokenizer to test with: its ids are bytes."""

from collections.abc import Generator, Sequence
from typing import Any, ClassVar

from headrace.tokenizer_proc.encoding.pairs import PairMarks
from headrace.tokenizer_proc.encoding.token_bytes import TokenBytes
from headrace.tokenizer_proc.jobs.stages import Ids, Text, ids_of


class ByteEncoder:
    """Ids are bytes, after a BOS of 1 where special tokens are wanted."""

    empty = ids_of([1])
    special_tokens: ClassVar[dict[str, int]] = {}
    infill_tokens: ClassVar[dict[str, int]] = {}
    prepends_space = False
    token_bytes: TokenBytes | None = None
    decodes_bytes = False

    def encode(self, texts: list[Text]) -> list[Ids]:
        return [ids_of([1] * text.add_special_tokens + list(text.text.encode())) for text in texts]

    def pair_marks(self) -> PairMarks:
        return PairMarks(ids_of([1]), ids_of([2]), ids_of([2]), 1)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(list(ids)).decode()

    def tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [f"<{id}>" for id in ids]


class FramedEncoder(ByteEncoder):
    """Puts 1 before and 2 after a text, as BERT's tokenizer does."""

    empty = ids_of([1, 2])

    def encode(self, texts: list[Text]) -> list[Ids]:
        return [ids_of([1, *text.text.encode(), 2]) for text in texts]


def finish(stages: Any, encoder: ByteEncoder) -> Any:
    """Return what a handler comes to."""
    if not isinstance(stages, Generator):
        return stages
    try:
        texts = next(stages)
        while True:
            texts = stages.send(encoder.encode(texts))
    except StopIteration as end:
        return end.value
