"""State slots: no slot is leaked or used twice, whatever comes, and checkpoints are found."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine_proc.kv_cache.state_slots import StateSlots

NUM_SLOTS = 5
DIGESTS = [bytes([i]) for i in range(4)]


class Slots(RuleBasedStateMachine):
    """The slots beside a model of them: users by slot, and which checkpoint each one is."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = StateSlots(NUM_SLOTS)
        self.held: list[int] = []  # one entry for each use
        self.checkpoints: dict[bytes, int] = {}  # that have users, or had some

    @precondition(lambda self: len(set(self.held)) < NUM_SLOTS)
    @rule()
    def allocate(self) -> None:
        slot = self.slots.allocate()
        assert slot not in self.held, "a slot has two writers"
        self.checkpoints = {d: s for d, s in self.checkpoints.items() if s != slot}
        self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.held))
        self.held.remove(slot)
        self.slots.free(slot)

    @precondition(lambda self: set(self.held) - set(self.checkpoints.values()))
    @rule(data=st.data(), digest=st.sampled_from(DIGESTS))
    def cache(self, data: st.DataObject, digest: bytes) -> None:
        plain = sorted(set(self.held) - set(self.checkpoints.values()))
        slot = data.draw(st.sampled_from(plain))
        assert self.slots.cache(slot, digest) == (digest not in self.checkpoints)
        self.checkpoints.setdefault(digest, slot)

    @rule(digest=st.sampled_from(DIGESTS))
    def find(self, digest: bytes) -> None:
        assert self.slots.has(digest) == (digest in self.checkpoints)
        if digest in self.checkpoints:
            slot = self.slots.find(digest)
            assert slot == self.checkpoints[digest]
            self.held.append(slot)

    @rule(digest=st.sampled_from(DIGESTS))
    def drop(self, digest: bytes) -> None:
        self.slots.drop(digest)
        self.checkpoints.pop(digest, None)

    @precondition(lambda self: not self.held)
    @rule()
    def reset(self) -> None:
        self.slots.reset()
        self.checkpoints.clear()

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        assert self.slots.num_free == NUM_SLOTS - len(set(self.held))
        assert len(self.checkpoints) == sum(map(self.slots.has, DIGESTS))


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=100, deadline=None)


def test_the_longest_unused_checkpoint_gives_way_first() -> None:
    slots = StateSlots(2)
    for digest in DIGESTS[:2]:
        slot = slots.allocate()
        slots.cache(slot, digest)
        slots.free(slot)
    slots.free(slots.find(DIGESTS[0]))
    slots.allocate()
    assert slots.has(DIGESTS[0]) and not slots.has(DIGESTS[1])


def test_a_slot_freed_twice_is_an_error() -> None:
    slots = StateSlots(1)
    slot = slots.allocate()
    slots.free(slot)
    with pytest.raises(AssertionError, match="twice"):
        slots.free(slot)
