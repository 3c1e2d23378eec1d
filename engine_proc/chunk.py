"""What a step computes of one sequence."""

from array import array
from dataclasses import dataclass, field

from headrace.engine_proc.sequence import Sequence

NO_TOKENS: "array[int]" = array("i")  # not to be added to


@dataclass(slots=True)  # not frozen: that would triple the cost of making one
class Chunk:
    """`count` tokens of a sequence from `start` on, then guesses at those that follow."""

    sequence: Sequence
    start: int
    count: int
    drafts: "array[int]" = field(default_factory=lambda: array("i"))  # only behind the last token
    is_decode: bool = False  # the newest token of a plain sequence, alone: there is a fast way

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return self.count + len(self.drafts)

    @property
    def is_last(self) -> bool:
        """Whether the sequence's next token, or its embedding, comes out of this step."""
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def watched(self) -> range:
        """The positions whose successors' log probabilities are wanted."""
        if not self.sequence.is_watched:
            return range(0)
        return range(self.start, min(self.start + self.count, self.sequence.num_prompt - 1))
