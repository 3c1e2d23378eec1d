"""Moves the states of sequences from slot to slot, and chooses which are kept. Pure.

A chunk reads the slot with the state before its first token, and writes another one. The slot that
it read is freed when its step closes, so a step can be run again.

A written state covers no drafts, since a state cannot be taken back token by token. Drafts that are
accepted are computed again by the next chunk, whose state covers them.

Checkpoints lie on page borders, where chunks end for them. A sequence leaves one at the last full
page of its prompt, and one where the pages that others have computed end without a checkpoint. Of
all other borders that it passes only the newest keeps one. That is the end of its turn, or where it
goes on after a preemption.
"""

from array import array
from collections.abc import Iterable

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import NO_STATE, Sequence


class SequenceStates:
    """The states of all sequences. Without slots, of a model without states, it does nothing.

    Args:
        pool: of the pages behind which checkpoints lie.
        caches: whether checkpoints are kept.
    """

    def __init__(self, slots: StateSlots, pool: PagePool, caches: bool) -> None:
        self._slots = slots
        self._pool = pool
        self._are_used = slots.num_slots > 0
        self._caches = caches and self._are_used

    def limit(self, max_num_seqs: int) -> int:
        """Return how many sequences may run, at most `max_num_seqs`."""
        if not self._are_used:
            return max_num_seqs
        return min(max_num_seqs, self._slots.most_sequences)

    def have_room(self, num_chunks: int, num_adopting: int = 0) -> bool:
        """Whether so many chunks can be in a step.

        Each writes a slot. While another step is open, the slots that sequences have stay in use.
        So one that adopts a checkpoint, which may be idle, needs a slot for that as well.
        """
        return not self._are_used or self._slots.num_free >= num_chunks + num_adopting

    def chunk_end(self, sequence: Sequence, end: int) -> int:
        """Return where a chunk ends that could end at `end`: at a border where there is one."""
        if not self._caches:
            return end
        start, page_tokens = sequence.num_computed, self._pool.page_tokens
        kept = self._prompt_border(sequence), sequence.branch
        borders = [border for border in kept if start < border < end]
        if borders:
            return min(borders)
        last_border = end // page_tokens * page_tokens
        return last_border if end < sequence.num_expected and last_border > start else end

    def begin(self, chunks: list[Chunk]) -> None:
        """Give the chunks of a step their slots."""
        for chunk in chunks if self._are_used else ():
            sequence = chunk.sequence
            chunk.state_in = sequence.state
            chunk.state_out = sequence.state = self._slots.allocate()
            chunk.state_end = sequence.num_computed = self._state_end(chunk)

    def _state_end(self, chunk: Chunk) -> int:
        """Return where a chunk's state ends: at its end, or at a border within accepted drafts.

        What is behind that border is computed again, so that the border gets its checkpoint.
        """
        border = chunk.end // self._pool.page_tokens * self._pool.page_tokens
        has_drafts = chunk.sequence.num_uncovered > 0 and chunk.is_last
        return border if self._caches and has_drafts and border > chunk.start else chunk.end

    def accept(self, chunk: Chunk, num_right: int) -> None:
        """Advance a sequence by the drafts that proved right, as far as its state covers them."""
        sequence = chunk.sequence
        if self._are_used:
            sequence.num_uncovered = len(sequence.tokens) - 1 - chunk.state_end
        else:
            sequence.num_computed += num_right

    def close(self, chunks: list[Chunk]) -> None:
        """Free what the chunks of a step have read: it will not be run again."""
        for chunk in chunks if self._are_used else ():
            if chunk.state_in != NO_STATE:
                self._slots.free(chunk.state_in)
                chunk.state_in = NO_STATE

    def take_back(self, chunk: Chunk) -> None:
        """Return a sequence to the state before a chunk, which will be scheduled again."""
        sequence, num_uncovered = chunk.sequence, chunk.sequence.num_uncovered
        self.free(self.remove(sequence))
        sequence.state, chunk.state_in = chunk.state_in, NO_STATE
        sequence.num_uncovered = num_uncovered

    def remove(self, sequence: Sequence) -> "array[int]":
        """Take a sequence's state from it; return the slot, to be freed.

        Its newest checkpoint stays: the sequence, or what follows it, goes on from there.
        """
        if sequence.newest_checkpoint:
            self._slots.on_kept(sequence.newest_checkpoint)
        slots = array("i") if sequence.state == NO_STATE else array("i", [sequence.state])
        sequence.state, sequence.num_uncovered = NO_STATE, 0
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """End one use of each slot."""
        for slot in slots:
            self._slots.free(slot)

    def reusable(self, sequence: Sequence, digests: list[bytes]) -> list[bytes]:
        """Return those of a sequence's next pages from which it can go on.

        All of them are cached, and the last is followed by a checkpoint.
        """
        if not self._are_used:
            return digests
        num_known = self._pool.count_cached(digests)
        count = num_known
        while count and not self._slots.has(digests[count - 1]):
            count -= 1
        if num_known > count and not sequence.num_computed:
            sequence.branch = num_known * self._pool.page_tokens
        return digests[:count]

    def adopt(self, sequence: Sequence, digest: bytes) -> None:
        """Let a sequence, whose own state is removed, go on from a checkpoint."""
        if self._are_used:
            sequence.state = self._slots.find(digest)

    def remember(self, chunk: Chunk) -> None:
        """Keep the state that a chunk has written, if it ends on a page's border."""
        sequence, page_tokens = chunk.sequence, self._pool.page_tokens
        end = chunk.state_end
        if not self._caches or end % page_tokens:
            return
        digest = sequence.digests[end // page_tokens - 1]
        is_new = self._slots.cache(chunk.state_out, digest)
        if digest == sequence.newest_checkpoint:  # it was preempted, and is there again
            return
        self._slots.drop(sequence.newest_checkpoint)
        is_kept = end in (sequence.branch, self._prompt_border(sequence))
        if is_kept:
            self._slots.on_kept(digest)
        sequence.newest_checkpoint = digest if is_new and not is_kept else b""

    def _prompt_border(self, sequence: Sequence) -> int:
        """Return the end of the last full page before a prompt's last token."""
        page_tokens = self._pool.page_tokens
        return (sequence.num_prompt - 1) // page_tokens * page_tokens

    def reset(self, cache_id: bytes) -> None:
        """Forget all states: the workers' memory is lost, and no sequence has one."""
        self._slots.reset(cache_id)
