"""Steps that workers compute: their results have not arrived. Pure."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import Sequence


@dataclass(slots=True)
class InflightStep:
    """Its chunks, and what their sequences have given up since: it may write to these pages and
    state slots."""

    chunks: list[Chunk]
    given_up: "list[array[int]]" = field(default_factory=list)
    states_given_up: "array[int]" = field(default_factory=lambda: array("i"))

    @property
    def is_foreseeable(self) -> bool:
        """Whether the next step can be chosen without the result, but for the tokens' ids.

        False where drafts are made or checked, and where a token decides how the next one is
        sampled. False where a prompt waits for an image, since its sequence leaves the running set
        in the next step.
        """
        return not any(
            chunk.is_draft
            or chunk.drafts
            or (chunk.is_last and chunk.sequence.looks_back)
            or chunk.sequence.awaits_image
            for chunk in self.chunks
            if not chunk.is_decode
        )


class InflightSteps(list[InflightStep]):
    """All of them, the oldest first."""

    @property
    def chunks(self) -> Iterator[Chunk]:
        """The chunks of all steps."""
        return (chunk for step in self for chunk in step.chunks)

    def last_with(self, sequence: Sequence) -> InflightStep | None:
        """Return the newest step that computes tokens of a sequence."""
        for step in reversed(self):
            if any(chunk.sequence is sequence for chunk in step.chunks):
                return step
        return None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the largest step, but for the draft model's."""
        own = (step.chunks for step in self if not step.chunks[0].is_draft)
        return max((sum(chunk.num_tokens for chunk in chunks) for chunks in own), default=0)
