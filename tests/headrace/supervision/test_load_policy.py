"""Models share the room that there is: none waits for ever, none takes too much."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.board.model_status import ModelState
from headrace.supervision.load_policy import (
    FIRST_RETRY_S,
    LAST_RETRY_S,
    LoadDecision,
    LoadPolicy,
    ModelDemand,
)

UNLOADED, LOADING, LOADED, UNLOADING = ModelState
LOAD_S, DRAIN_S, LOOK_S = 2.0, 1.0, 0.5
NUM_LOOKS = 400
IDLE = ModelDemand(LOADED, 0, is_busy=False)
BUSY = ModelDemand(LOADED, 0, is_busy=True)
ASKED = ModelDemand(UNLOADED, 1, is_busy=False)
GONE = ModelDemand(UNLOADED, 0, is_busy=False)
NOTHING = LoadDecision([], [])


class Machine:
    """Models that take time to load and to leave, and requests that come at some looks."""

    def __init__(self, shares: Sequence[float], limit: float) -> None:
        self.policy = LoadPolicy(shares, limit)
        self.shares = [min(share, limit) for share in shares]
        self.states = [UNLOADED] * len(shares)
        self.waiting = [0] * len(shares)
        self.until = [0.0] * len(shares)
        self.now = 0.0
        self.loads: list[int] = []

    @property
    def taken(self) -> float:
        """The room that is taken."""
        return sum(
            share
            for share, state in zip(self.shares, self.states, strict=True)
            if state is not UNLOADED
        )

    def look(self, arrivals: Sequence[int], busy: Sequence[int]) -> None:
        """Let time pass, requests come, and the policy decide."""
        self.now += LOOK_S
        for model in arrivals:
            self.waiting[model] += 1
        for model, state in enumerate(self.states):
            if self.now >= self.until[model] and state in (LOADING, UNLOADING):
                self.states[model] = LOADED if state is LOADING else UNLOADED
        demands = [
            ModelDemand(state, waiting, state is LOADED and model in busy)
            for model, (state, waiting) in enumerate(zip(self.states, self.waiting, strict=True))
        ]
        decision = self.policy.decide(demands, self.now)
        for model in decision.unload:
            assert self.states[model] is LOADED
            assert not self.waiting[model], "its requests run first"
            self.states[model], self.until[model] = UNLOADING, self.now + DRAIN_S
        for model in decision.load:
            assert self.states[model] is UNLOADED
            assert self.waiting[model], "nothing is loaded that is not asked for"
            self.states[model], self.until[model] = LOADING, self.now + LOAD_S
            self.loads.append(model)
        for model, state in enumerate(self.states):
            if state is LOADED:  # what waited is sent
                self.waiting[model] = 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_models_fit_and_each_is_loaded_that_is_asked_for(data: st.DataObject) -> None:
    shares = data.draw(st.lists(st.sampled_from([0.2, 0.3, 0.5, 0.7, 1.0]), min_size=1, max_size=5))
    machine = Machine(shares, 1.0)
    models = st.integers(0, len(shares) - 1)
    busy = data.draw(st.sets(models))
    asked_at: dict[int, float] = {}
    patience_s = (len(shares) + 1) * (2 * LOAD_S + DRAIN_S + 4 * LOOK_S)
    for arrivals in data.draw(st.lists(st.lists(models, max_size=2), max_size=60)):
        machine.look(arrivals, list(busy))
        assert machine.taken <= 1.0 + 1e-6
        for model, waiting in enumerate(machine.waiting):
            if not waiting:
                asked_at.pop(model, None)
            assert machine.now - asked_at.setdefault(model, machine.now) < patience_s
    for _ in range(NUM_LOOKS):
        if not any(machine.waiting):
            break
        machine.look([], list(busy))
    assert not any(machine.waiting)


def test_the_model_that_waits_longest_is_loaded_first() -> None:
    machine = Machine([1, 1, 1, 1], 1)
    machine.look([2], [])
    machine.look([1], [])
    machine.look([3, 0], [])
    while any(machine.waiting):
        machine.look([], [])
    assert machine.loads == [2, 1, 0, 3]


def test_the_least_recently_used_model_leaves() -> None:
    policy = LoadPolicy([1, 1, 1], 2)
    assert policy.decide([IDLE, IDLE, GONE], 0) == NOTHING
    assert policy.decide([BUSY, IDLE, GONE], 1) == NOTHING
    assert policy.decide([IDLE, BUSY, GONE], 2) == NOTHING
    assert policy.decide([IDLE, IDLE, ASKED], 3) == LoadDecision([], [0])


def test_a_busy_model_serves_for_as_long_as_its_load_took() -> None:
    policy = LoadPolicy([1, 1], 1)
    loading = ModelDemand(LOADING, 1, is_busy=False)
    assert policy.decide([loading, GONE], 10) == NOTHING
    assert policy.decide([BUSY, ASKED], 13) == NOTHING, "loaded now, after 3 s"
    assert policy.decide([BUSY, ASKED], 15.9) == NOTHING
    assert policy.decide([IDLE, ASKED], 15.9) == LoadDecision([], [0]), "nothing is lost"
    assert policy.decide([BUSY, ASKED], 16) == LoadDecision([], [0])


def test_a_model_with_waiting_requests_does_not_leave() -> None:
    policy = LoadPolicy([1, 1], 1)
    assert policy.decide([ModelDemand(LOADED, 1, is_busy=False), ASKED], 100) == NOTHING


def test_a_model_that_leaves_is_waited_for() -> None:
    policy = LoadPolicy([1, 1], 1)
    leaving = ModelDemand(UNLOADING, 1, is_busy=True)
    assert policy.decide([leaving, ASKED], 0) == NOTHING
    assert policy.decide([ASKED, ASKED], 1) == LoadDecision([0], []), "it was first in the queue"


def test_a_model_that_failed_waits_longer_each_time() -> None:
    policy = LoadPolicy([1], 1)
    assert policy.fail(0, 0) == FIRST_RETRY_S
    assert policy.decide([ASKED], FIRST_RETRY_S - 1) == NOTHING
    assert policy.decide([ASKED], FIRST_RETRY_S) == LoadDecision([0], [])
    assert policy.fail(0, 10) == 10 + 2 * FIRST_RETRY_S
    assert [policy.fail(0, 0) for _ in range(1100)][-1] == LAST_RETRY_S
    policy.ask(0)
    assert policy.decide([GONE], 20) == LoadDecision([0], []), "an operator does not wait"
    policy.decide([IDLE], 21)
    assert policy.fail(0, 22) == 22 + FIRST_RETRY_S, "it worked meanwhile"


def test_models_are_loaded_side_by_side_where_they_fit() -> None:
    assert LoadPolicy([1, 1, 1], 2).decide([ASKED] * 3, 0) == LoadDecision([0, 1], [])
    assert LoadPolicy([0.6, 0.4, 0.4], 1).decide([ASKED] * 3, 0) == LoadDecision([0, 1], [])


def test_further_engines_take_room() -> None:
    policy = LoadPolicy([0.5, 0.4, 0.4], 1, growths=[0.5, 0.4, 0.4])
    policy.resize(1, 1)
    assert policy.decide([IDLE, GONE, ASKED], 0) == LoadDecision([2], [])
    assert policy.decide([IDLE, ASKED, GONE], 1) == LoadDecision([], [0])
    policy.resize(1, 0)
    assert policy.decide([IDLE, ASKED, GONE], 2) == LoadDecision([1], [])
    policy.resize(1, 7)
    assert policy.decide([GONE, ASKED, GONE], 3) == LoadDecision([1], []), "it fits alone"


def test_a_server_starts_with_the_first_models_that_fit() -> None:
    assert LoadPolicy([1, 1, 1], 2).num_first == 2
    assert LoadPolicy([0.5, 0.4, 0.2], 1).num_first == 2
    assert LoadPolicy([7, 1], 1).num_first == 1, "it fits alone"
    assert LoadPolicy([1, 1], float("inf")).num_first == 2
