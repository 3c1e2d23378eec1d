"""A sequence's state in its grammar: gives the bitmask of allowed next tokens."""

from array import array
from typing import TYPE_CHECKING

from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarMatcher:
    """A grammar, and the number of generated tokens it has consumed.

    Tokens are consumed when a mask is requested, so no time is spent between steps. Preemption does
    not matter: a preempted sequence keeps its tokens.

    Args:
        inner: a matcher that has seen nothing, this one's own.
        ends: EOS ids. A draft of one ends the text, and what may follow does not matter.
    """

    def __init__(self, inner: "LLMatcher", ends: frozenset[int]) -> None:
        self._inner = inner
        self._ends = ends
        self._num_seen = 0

    @property
    def is_stuck(self) -> bool:
        """Whether the grammar cannot be followed any further; masks then ban nothing."""
        return self._inner.is_error()

    @property
    def error(self) -> str:
        """Why it is stuck, in llguidance's words, for the log; "" while it is not."""
        return self._inner.get_error().partition("\n")[0]

    def fill(
        self, generated: "array[int]", drafts: "array[int]", area: GrammarBitmask, first: int
    ) -> None:
        """Write the masks of the token after `generated` and of those after each of `drafts`.

        No draft that the grammar bans equals what is drawn in its place; the masks after it are
        not looked at, and ban nothing.
        """
        self._follow(generated)
        num_drafted = 0
        for place in range(len(drafts) + 1):
            self._inner.unsafe_compute_mask_ptr(area.address(first + place), area.mask_bytes)
            if place == len(drafts) or not self._consume_draft(drafts[place]):
                break
            num_drafted += 1
        for place in range(num_drafted + 1, len(drafts) + 1):
            area.allow_all(first + place)
        if self.is_stuck:
            area.allow_all(first)
        elif num_drafted:
            self._inner.rollback(num_drafted)

    def fill_next(
        self, generated: "array[int]", drafts: "array[int]", area: GrammarBitmask, row: int
    ) -> None:
        """Write the mask of the token after `generated` and `drafts`.

        It bans nothing where the drafts end the text, or the grammar cannot be followed.
        """
        self._follow(generated)
        num_drafted = 0
        while num_drafted < len(drafts) and self._consume_draft(drafts[num_drafted]):
            num_drafted += 1
        if num_drafted == len(drafts):
            self._inner.unsafe_compute_mask_ptr(area.address(row), area.mask_bytes)
        if self.is_stuck or num_drafted < len(drafts):
            area.allow_all(row)
        if num_drafted and not self.is_stuck:
            self._inner.rollback(num_drafted)

    def _follow(self, generated: "array[int]") -> None:
        self._inner.consume_tokens(generated[self._num_seen :].tolist())
        self._num_seen = len(generated)

    def _consume_draft(self, token: int) -> bool:
        return token not in self._ends and self._inner.try_consume_tokens([token]) == 1
