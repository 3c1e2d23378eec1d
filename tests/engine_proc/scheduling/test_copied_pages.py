"""Sequences get their pages from a GPU's host tier, with the tokens they would have without it."""

import random
from array import array
from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scheduler_rig import Rig, generate_alone, make_sequence

from headrace.engine_proc.kv_cache.host_tier import CachePools, HostTier
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.messages import request_id
from headrace.ipc.worker_messages import CacheLayout, CopyPages

NUM_PAGES, PAGE_TOKENS, BUDGET = 9, 2, 4
NUM_HOST_PAGES, NUM_HOST_STATES, NUM_RESERVED = 40, 30, 4
NUM_SEQUENCES, PROMPT, MAX_TOKENS = 8, 6, 10
MAX_TURNS = 3000


class TierRig:
    """A scheduler whose pool lies on a host tier, with copies that take some turns.

    Attributes:
        num_found: pages, or states, that came from the host.
    """

    def __init__(self, depth: int = 1, num_states: int = 0) -> None:
        self.num_found = 0
        self._host: dict[int, list[int]] = {}
        self._host_states: dict[int, list[int]] = {}
        self._asked: deque[CopyPages] = deque()
        self.rig = Rig.make(
            NUM_PAGES,
            PAGE_TOKENS,
            BUDGET,
            NUM_SEQUENCES,
            depth,
            num_states,
            num_reserved=NUM_RESERVED,
            fetch=lambda sequence: self.tier.enter(sequence),
            copy_in=lambda sequence: self.tier.copy_in(sequence),
        )
        assert self.rig.slots is not None
        num_host_states = NUM_HOST_STATES if num_states else 0
        host = CachePools(PagePool(NUM_HOST_PAGES, PAGE_TOKENS), StateSlots(num_host_states))
        layout = CacheLayout(NUM_HOST_PAGES, num_host_states, [1000], [500 if num_states else 0])
        self.tier = HostTier(CachePools(self.rig.pool, self.rig.slots), host, layout)
        self.rig.copied = lambda: {
            page for copy in self.tier._open for page in copy.before + copy.pages
        }
        self.rig.copied_slots = lambda: [slot for copy in self.tier._open for slot in copy.slots]

    def ask(self) -> None:
        """Send the workers what they are to copy; as in the engine, a suspect gets all pages."""
        while not self.rig.scheduler.has_suspects and (copies := self.tier.next()) is not None:
            self._asked.append(copies)

    def answer(self) -> None:
        """Make the oldest copy: what it writes was not there before."""
        if not self._asked:
            return
        copies, worker = self._asked.popleft(), self.rig.worker
        for places, host_places, on_gpu, on_host in (
            (copies.pages, copies.host_pages, worker._cache, self._host),
            (copies.slots, copies.host_slots, worker._states, self._host_states),
        ):
            for place, host in zip(array("i", places), array("i", host_places), strict=True):
                if copies.to_host:
                    on_host[host] = list(on_gpu[place])
                else:
                    on_gpu[place] = list(on_host[host])
        copy = self.tier.take(0.0)
        self.num_found += 0 if copy.to_host else len(copy.digests) + len(copy.states)

    def lose_workers(self) -> None:
        """Lose all pages but the host's, in the middle of copies."""
        self._asked.clear()
        self.tier.lose_workers()
        self.rig.lose()

    def run(self, sequences: list[Sequence], choose: random.Random, deaths: float = 0.0) -> None:
        """Run sequences to their ends."""
        for sequence in sequences:
            self.rig.add(sequence)
        for _ in range(MAX_TURNS):
            if len(self.rig.finished) == len(sequences):
                return
            self.ask()
            if choose.random() < 0.6:
                self.answer()
            if choose.random() < deaths:
                self.lose_workers()
            self.rig.step()
        pytest.fail(f"{len(self.rig.finished)} of {len(sequences)} sequences have ended")


def make_sequences(choose: random.Random) -> list[Sequence]:
    """Return sequences that do not fit the pool at once; some have prefixes of others."""
    prompts = [choose.choices(range(1, 11), k=PROMPT) for _ in range(NUM_SEQUENCES)]
    for place in range(1, NUM_SEQUENCES, 3):
        prompts[place] = prompts[place - 1][:4] + prompts[place][4:]
    ids = [request_id(0, 1 + i) for i in range(NUM_SEQUENCES)]
    return [make_sequence(p, MAX_TOKENS, id) for p, id in zip(prompts, ids, strict=True)]


def check(rig: TierRig, sequences: list[Sequence]) -> None:
    """Check that all said what each says alone."""
    for sequence in sequences:
        said = rig.rig.said[sequence.id], rig.rig.finished[sequence.id]
        assert said == generate_alone(sequence.tokens[:PROMPT].tolist(), MAX_TOKENS)


@example(seed=278843, depth=2, deaths=0.02, num_states=0)  # copies have a suspect's pages
@given(
    seed=st.integers(0, 1 << 20),
    depth=st.integers(1, 2),
    deaths=st.sampled_from([0, 0.02]),
    num_states=st.sampled_from([0, 3, 7, 20]),
)
def test_tokens_are_those_without_a_host_tier(
    seed: int, depth: int, deaths: float, num_states: int
) -> None:
    choose, rig = random.Random(seed), TierRig(depth, num_states)
    sequences = make_sequences(choose)
    rig.run(sequences, choose, deaths)
    check(rig, sequences)


@pytest.mark.parametrize("num_states", [0, 12])
def test_a_preempted_sequence_gets_its_pages_from_the_host(num_states: int) -> None:
    choose, rig = random.Random(1), TierRig(num_states=num_states)
    sequences = make_sequences(choose)
    rig.run(sequences, choose)
    assert rig.rig.scheduler.counts.preemptions > 0 and rig.num_found > 0
    check(rig, sequences)


@pytest.mark.parametrize("num_states", [0, 3])
def test_a_prompt_computed_before_a_death_is_not_computed_again(num_states: int) -> None:
    choose, rig = random.Random(0), TierRig(num_states=num_states)
    prompt = choose.choices(range(1, 11), k=PROMPT)
    first, second = (make_sequence(prompt, 2, request_id(0, i)) for i in (1, 2))
    rig.run([first], choose)
    while rig.tier.is_busy:
        rig.ask()
        rig.answer()
    rig.lose_workers()
    assert rig.rig.pool.num_cached == 0
    rig.rig.add(second)
    while not second.has_ended:
        rig.ask()
        rig.answer()
        rig.rig.step()
    assert second.num_cached == (PROMPT - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert rig.rig.said[second.id] == rig.rig.said[first.id]
