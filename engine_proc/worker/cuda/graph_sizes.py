"""The step sizes captured as CUDA graphs, and the choice of a graph for a step. Pure.

A graph does any step that is no larger than it: what is missing is padding. So what is said of
decodes, pieces of prompts and guesses is only how large steps of each kind are.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

DECODES = (1, 2, 4, *range(8, 257, 8), *range(288, 513, 32))  # sequences with a token each
MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)  # of prompts and decodes together
MIXED_SEQUENCES = (8, 64, 256)  # with a logit row each
MAX_DRAFT_TOKENS = MIXED_TOKENS[-1]


@dataclass(frozen=True, order=True)
class Sizes:
    """The size of a step, or the largest step of a graph."""

    num_tokens: int
    num_sequences: int
    num_rows: int  # whose logits are wanted

    def holds(self, step: "Sizes") -> bool:
        """Whether a graph of this size does the step."""
        return (
            step.num_tokens <= self.num_tokens
            and step.num_sequences <= self.num_sequences
            and step.num_rows <= self.num_rows
        )

    @property
    def cost(self) -> tuple[int, int]:
        """Cost of a step, by matrix sizes alone: that of a row is the vocabulary."""
        return self.num_tokens + self.num_rows, self.num_sequences


class Buckets:
    """The graphs that there are, by size."""

    def __init__(self, sizes: Iterable[Sizes]) -> None:
        self._sizes = sorted(set(sizes), key=lambda size: size.cost)
        self._costs = [size.cost for size in self._sizes]

    def __iter__(self) -> Iterator[Sizes]:
        """Yield all, the largest first: in this order the others find room in its memory."""
        return reversed(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def choose(self, step: Sizes) -> Sizes | None:
        """Return the cheapest that does a step; None is that it is too large for any."""
        first = bisect_left(self._costs, step.cost)
        return next((size for size in self._sizes[first:] if size.holds(step)), None)


def buckets_of(
    max_sequences: int,
    max_tokens: int,
    capture_sizes: Sequence[int] = (),
    num_drafts: int = 0,
) -> Buckets:
    """Return the sizes to capture.

    Args:
        max_sequences, max_tokens: of a step.
        capture_sizes: tokens of the graphs, instead of ours.
        num_drafts: draft tokens of each sequence in a step; 0 without speculation.
    """
    decodes = {min(size, max_sequences) for size in capture_sizes or DECODES}
    sizes = [Sizes(size, size, size) for size in decodes]
    for size in decodes if num_drafts else ():
        num_tokens = size * (1 + num_drafts)
        if num_tokens <= min(max_tokens, MAX_DRAFT_TOKENS):
            sizes.append(Sizes(num_tokens, size, num_tokens))
    for num_tokens in capture_sizes or MIXED_TOKENS:
        for num_sequences in MIXED_SEQUENCES:
            most = min(num_sequences, max_sequences)
            if most < num_tokens <= max_tokens:
                sizes.append(Sizes(num_tokens, most, most))
    return Buckets(sizes)
