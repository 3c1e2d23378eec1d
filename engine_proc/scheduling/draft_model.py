"""What the draft model has computed of each sequence, and its next steps. Pure.

The draft model has keys and values of its own in pages with the numbers of the model's. A layer of
the model itself has them in the model's pages. They follow a sequence's tokens when it is drafted
for: a prompt, and what was not drafted since, comes first. A page that is wrong, as one that the KV
store has filled meanwhile, costs acceptance and changes no token.
"""

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.sequence.chunk import NO_TOKENS, Chunk
from headrace.engine_proc.sequence.sequence import Sequence

CATCH_UP_TOKENS = 128  # of a sequence between two steps of the model


class DraftModel:
    """Drafts for sequences in steps of a second model.

    Args:
        pool: of the pages.
        vocab_size: of the model; a token beyond is no draft.
        has_pages: the draft model has its own; else it computes with the model's, which overwrites
            what the draft model has written.
        from_hidden: it is a layer that reads the hidden state before each token, which the model
            leaves in its pages. A first token has none. Those before drafts are guesses, so
            accepted drafts are computed again. A token's keys and values lie one position before
            its own. So the last position of a shared page is that of the first sequence.
    """

    def __init__(
        self,
        pool: PagePool,
        vocab_size: int,
        has_pages: bool = True,
        from_hidden: bool = False,
    ) -> None:
        self._pool = pool
        self._vocab_size = vocab_size
        self.has_pages = has_pages
        self._shift = int(from_hidden)  # of positions against tokens
        self._full: dict[int, bytes] = {}  # pages computed whole: the digests of their tokens

    def settle(self, sequence: Sequence) -> None:
        """Keep of what was computed for drafts that which the sequence's tokens have become."""
        tokens, first = sequence.tokens, sequence.first_draft
        if sequence.drafts and len(tokens) > first:
            # The last one was drawn alone.
            computed = NO_TOKENS if self._shift else sequence.drafts[:-1]
            told = tokens[first : first + len(computed)]
            num_same = next((i for i, t in enumerate(told) if t != computed[i]), len(told))
            num_drafted = first + num_same
            sequence.drop_drafts()
            self._advance(sequence, num_drafted)
        if not self.has_pages and not sequence.drafts:
            sequence.num_drafted = sequence.num_computed
        page_tokens = self._pool.page_tokens
        num_full = (len(tokens) - 1 - self._shift) // page_tokens
        for page in range(self._page_of(sequence.num_drafted), num_full):
            is_there = page < len(sequence.digests) and self.has_pages
            if not is_there or self._full.get(sequence.pages[page]) != sequence.digests[page]:
                break
            sequence.num_drafted = (page + 1) * page_tokens + self._shift

    def num_behind(self, sequence: Sequence) -> int:
        """Return how many tokens the draft model has not computed, the newest one included."""
        return max(0, len(sequence.tokens) - self._start(sequence))

    def next_chunk(self, sequence: Sequence, budget: int) -> Chunk | None:
        """Return what is to be computed for a sequence's next draft, or before it.

        The result is None where there are too few pages.

        Args:
            budget: the most tokens.
        """
        num_behind = self.num_behind(sequence)
        if num_behind:
            start, count = self._start(sequence), min(num_behind, CATCH_UP_TOKENS, budget)
        else:
            start, count = sequence.first_draft + len(sequence.drafts) - 1, 1
        num_missing = self._pool.pages_for(start + count) - len(sequence.pages)
        if not 0 < count <= budget or not self._pool.can_allocate(max(0, num_missing)):
            return None
        if num_missing > 0:
            sequence.pages.extend(self._pool.allocate(num_missing))
        for page in range(self._page_of(start), self._page_of(start + count - 1) + 1):
            self._full.pop(sequence.pages[page], None)
        is_last = count >= num_behind
        return Chunk(sequence, start, count, NO_TOKENS, is_last, is_draft=True)

    def take(self, chunk: Chunk, outcome: ResultReader) -> None:
        """Read what a step has drafted for a sequence."""
        sequence = chunk.sequence
        token, chance = outcome.draft() if chunk.is_last else (self._vocab_size, 0.0)
        if sequence.has_ended:
            return
        if not sequence.drafts:
            self._advance(sequence, chunk.end)
            sequence.first_draft = chunk.end
        if token < self._vocab_size:
            sequence.drafts.append(token)
            sequence.draft_chances.append(chance)

    def _start(self, sequence: Sequence) -> int:
        """Return the first token of a sequence that is to be computed."""
        return max(sequence.num_drafted, self._shift)

    def _page_of(self, token: int) -> int:
        """Return in which page of its sequence a token's keys and values lie."""
        return max(0, token - self._shift) // self._pool.page_tokens

    def _advance(self, sequence: Sequence, end: int) -> None:
        """Note that all tokens before `end` are computed."""
        last = min(self._page_of(end), len(sequence.digests))
        for page in range(self._page_of(sequence.num_drafted), last):
            self._full[sequence.pages[page]] = sequence.digests[page]
        sequence.num_drafted = end

    def lose_pages(self) -> None:
        """Note that what was computed is lost."""
        self._full.clear()
