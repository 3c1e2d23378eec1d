"""Gives sequences their pages, found by their prefix or newly allocated, and fills the cache. Pure.

A full page is found by a digest of all tokens up to its end. Models with states go on only from a
page that a checkpoint follows (`sequence_states.py`).
"""

from array import array
from collections.abc import Callable

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.sequence_states import SequenceStates
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.image_placeholder import page_marks
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.page_digests import NO_MARKS, chain_digests


class SequencePages:
    """The pages of all sequences.

    Args:
        caches: whether full pages are found again.
        give_back: frees a sequence's pages and state slots once no open step may write to them.
        fetch: has a sequence wait for what the KV store has of it.
        copy_in: has it wait for what a GPU's host tier has of it.
    """

    def __init__(
        self,
        pool: PagePool,
        states: SequenceStates,
        caches: bool,
        give_back: "Callable[[Sequence, array[int], array[int]], None]",
        fetch: Callable[[Sequence], None] | None,
        copy_in: Callable[[Sequence], None] | None = None,
    ) -> None:
        self._pool = pool
        self._states = states
        self._caches = caches
        self._give_back = give_back
        self.fetch = fetch or (lambda _: None)
        self._copy_in = copy_in or (lambda _: None)

    def digest(self, sequence: Sequence, num_tokens: int) -> None:
        """Bring the digests of a sequence's full pages up to `num_tokens`."""
        if self._caches:
            page_tokens = self._pool.page_tokens
            end = num_tokens // page_tokens
            salt = sequence.request.salt
            marks = page_marks(sequence.images, page_tokens) if sequence.images else NO_MARKS
            chain_digests(sequence.digests, sequence.tokens, page_tokens, end, salt, marks)

    def reuse(self, sequence: Sequence) -> int:
        """Extend a sequence by cached pages of its prefix. At least one token stays to compute.

        Returns:
            The number of tokens found in the prefix cache.
        """
        if not self._caches or sequence.needs_prompt_logprobs:
            return 0
        page_tokens = self._pool.page_tokens
        first, end = sequence.num_computed // page_tokens, (len(sequence.tokens) - 1) // page_tokens
        digests = self._states.reusable(sequence, sequence.digests[first:end])
        found = self._pool.match_prefix(digests)
        if not found:
            return 0
        self._give_back(sequence, sequence.pages[first:], self._states.remove(sequence))
        self._states.adopt(sequence, digests[-1])
        sequence.pages = sequence.pages[:first] + found
        num_before = sequence.num_computed
        sequence.num_computed = (first + len(found)) * page_tokens
        return sequence.num_computed - num_before

    def waits_for_pages(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for pages of a tier beneath; asks for them once there is room.

        What the KV store has comes first: it goes through the host tier, if there is one.
        """
        if sequence.seeks_pages:
            missing = self.num_missing(sequence, sequence.num_pending + 1)
            if self._pool.can_allocate(missing):
                sequence.seeks_pages = False
                self.fetch(sequence)
        if self._caches and not (sequence.is_fetching or sequence.needs_prompt_logprobs):
            self._copy_in(sequence)
        return sequence.is_fetching or sequence.is_copying

    def remember(self, chunk: Chunk, end: int) -> None:
        """Put the pages that a chunk, and its drafts up to `end`, have filled into the cache."""
        sequence, page_tokens = chunk.sequence, self._pool.page_tokens
        first, last = chunk.start // page_tokens, end // page_tokens
        if self._caches and first < last:
            self.digest(sequence, end)
            for page in range(first, last):
                self._pool.cache_of(sequence, page, sequence.pages[page])
            self._states.remember(chunk)

    def num_missing(self, sequence: Sequence, count: int) -> int:
        """Return how many pages a sequence lacks for `count` more tokens; it may be negative."""
        return self._pool.pages_for(sequence.num_computed + count) - len(sequence.pages)

    def allocate(self, sequence: Sequence, count: int) -> None:
        """Give a sequence the pages for `count` more tokens. There must be so many."""
        missing = self.num_missing(sequence, count)
        if missing > 0:
            sequence.pages.extend(self._pool.allocate(missing))
