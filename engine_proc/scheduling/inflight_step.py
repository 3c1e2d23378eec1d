"""A step that workers compute: its result has not arrived. Pure."""

from array import array
from dataclasses import dataclass, field

from headrace.engine_proc.sequence.chunk import Chunk


@dataclass(slots=True)
class InflightStep:
    """Its chunks, and pages and state slots that were given up since: it, or one before it, may
    write to them."""

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
