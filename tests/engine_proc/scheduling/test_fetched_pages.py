"""Sequences that lost their pages to others get them from the KV store, with the same tokens."""

import random

import pytest
from scheduler_rig import Rig, generate_alone, make_sequence

from headrace.engine_proc.kv_cache.page_fetcher import PageFetcher
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.messages import request_id
from headrace.ipc.page_digests import DIGEST_BYTES
from headrace.ipc.worker_messages import (
    CacheLayout,
    FetchedRecords,
    FetchRecords,
    Lookup,
    LookupResult,
)

NUM_PAGES, PAGE_TOKENS, BUDGET = 9, 2, 4
NUM_SEQUENCES, PROMPT, MAX_TOKENS = 8, 6, 10
MAX_STEPS = 1000


class StoreRig:
    """A scheduler whose pool lies on a store that has all that was ever cached.

    Attributes:
        num_fetched: pages that the store wrote.
        num_computed: tokens of all steps.
    """

    def __init__(self, prompt_s: float) -> None:
        self.num_fetched = self.num_computed = 0
        self._records: dict[bytes, list[int]] = {}
        self.rig = Rig.make(NUM_PAGES, PAGE_TOKENS, BUDGET, NUM_SEQUENCES, fetch=self._enter)
        layout = CacheLayout(NUM_PAGES, 0, [1000], [0])
        assert self.rig.slots is not None
        self.fetcher = PageFetcher(
            self.rig.pool, self.rig.slots, layout, lambda _: prompt_s, lambda: 0.0
        )

    def _enter(self, sequence: Sequence) -> None:
        self.fetcher.enter(sequence)

    def _answer(self, message: Lookup | FetchRecords) -> LookupResult | FetchedRecords:
        starts = range(0, len(message.digests), DIGEST_BYTES)
        digests = [message.digests[start : start + DIGEST_BYTES] for start in starts]
        is_there = bytes(digest in self._records for digest in digests)
        if isinstance(message, Lookup):
            return LookupResult(is_there, bytes(len(is_there)))
        for digest, page in zip(digests, memoryview(message.places).cast("i"), strict=True):
            self.rig.worker._cache[page] = list(self._records[digest])
        self.num_fetched += len(digests)
        return FetchedRecords(is_there, 0.0, 0.0)

    def step(self) -> None:
        """Answer all that is asked, and run a step; keep what is cached then."""
        message = self.fetcher.ask()
        while message is not None:
            assert isinstance(message, Lookup | FetchRecords)
            message = self.fetcher.ask(self._answer(message))
        if self.rig.scheduler.has_work:
            self.rig.step()
        for digest, page in self.rig.pool._pages.items():
            self._records[digest] = list(self.rig.worker._cache[page])

    def run(self, sequences: list[Sequence]) -> None:
        """Run sequences to their ends."""
        for sequence in sequences:
            self.rig.add(sequence)
        for _ in range(MAX_STEPS):
            if len(self.rig.finished) == len(sequences):
                return
            self.step()
        pytest.fail(f"{len(self.rig.finished)} of {len(sequences)} sequences have ended")


def make_sequences(seed: int) -> list[Sequence]:
    """Return sequences that do not fit the pool at once."""
    numbers = random.Random(seed)
    prompts = [numbers.choices(range(1, 11), k=PROMPT) for _ in range(NUM_SEQUENCES)]
    ids = [request_id(0, 1 + i) for i in range(NUM_SEQUENCES)]
    return [make_sequence(p, MAX_TOKENS, id) for p, id in zip(prompts, ids, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_a_preempted_sequence_fetches_what_it_has_lost(seed: int) -> None:
    store, sequences = StoreRig(prompt_s=1.0), make_sequences(seed)
    store.run(sequences)
    assert store.rig.scheduler.counts.preemptions > 0 and store.num_fetched > 0
    for sequence in sequences:
        said = store.rig.said[sequence.id], store.rig.finished[sequence.id]
        assert said == generate_alone(sequence.tokens[:PROMPT].tolist(), MAX_TOKENS)


def test_a_preempted_sequence_computes_where_that_is_quicker() -> None:
    store, sequences = StoreRig(prompt_s=0.0), make_sequences(0)
    store.run(sequences)
    assert store.rig.scheduler.counts.preemptions > 0 and store.num_fetched == 0
