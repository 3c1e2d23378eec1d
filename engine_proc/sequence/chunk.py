"""One sequence's share of a step."""

from array import array
from dataclasses import dataclass

from headrace.engine_proc.sequence.sequence import NO_STATE, Sequence

NO_TOKENS: "array[int]" = array("i")  # not to be added to
NOWHERE = range(0)


@dataclass(slots=True)  # not frozen: that would triple the cost of making one
class Chunk:
    """`count` tokens of a sequence from `start` on, then draft tokens.

    A chunk does not change when its sequence goes on or ends.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: "array[int]"  # only behind the last token
    is_last: bool  # the sequence's next token, or its embedding, comes out of this step
    is_decode: bool = False  # the newest token of a plain sequence, alone: there is a fast way
    state_in: int = NO_STATE  # the slot with the state before it; none before the first token
    state_out: int = NO_STATE  # the slot that gets the state behind it
    state_end: int = 0  # the position before which that state ends
    is_draft: bool = (
        False  # of a step of the draft model: it draws what follows the sequence's drafts
    )
    watched: range = NOWHERE  # the positions whose successors' log probabilities are wanted

    @classmethod
    def of(
        cls, sequence: Sequence, start: int, count: int, drafts: "array[int]" = NO_TOKENS
    ) -> "Chunk":
        """Make one of a sequence as it is now."""
        end = start + count
        chunk = cls(sequence, start, count, drafts, end == sequence.num_expected)
        if sequence.needs_prompt_logprobs:
            chunk.watched = range(start, min(end, sequence.num_prompt - 1))
        return chunk

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return self.count + len(self.drafts)

    @property
    def is_prefill(self) -> bool:
        """Whether tokens of the sequence's prompt are computed."""
        return self.start < self.sequence.num_prompt

    @property
    def end(self) -> int:
        """The position behind the last token, guesses aside."""
        return self.start + self.count
