"""The order of admission: by policy, then by the service of the key, then by arrival."""

from array import array

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.fair_share import MAX_KEYS, FairShare
from headrace.engine_proc.scheduling.waiting_queue import (
    AGE_TOKENS,
    PASSING,
    Policy,
    WaitingQueue,
    make_turn,
)
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.messages import GenerateRequest, Sampling
from headrace.ipc.page_digests import chain_digests

PAGE = 4


class Queue:
    """A queue with its pool and shares."""

    def __init__(self, policy: Policy) -> None:
        self.pool = PagePool(16, PAGE)
        self.shares = FairShare()
        self.queue = WaitingQueue(policy, self.pool, self.shares)
        self.num = 0

    def add(
        self,
        prompt: list[int] | None = None,
        key: int = 0,
        priority: int = 0,
        step: int = 0,
        turn: int = 0,
    ) -> Sequence:
        self.num += 1
        request = GenerateRequest(self.num, 0, 1, Sampling(), [], b"", priority=priority, key=key)
        sequence = Sequence.of(request, array("I", prompt or [1]).tobytes())
        sequence.turn, sequence.queued_at = turn or self.num, step
        chain_digests(sequence.digests, sequence.tokens, PAGE, len(sequence.tokens) // PAGE)
        self.shares.enter(key)
        self.queue.add(sequence)
        return sequence

    def remember(self, prompt: list[int]) -> None:
        digests: list[bytes] = []
        chain_digests(digests, array("i", prompt), PAGE, len(prompt) // PAGE)
        for page, digest in zip(self.pool.allocate(len(digests)), digests, strict=True):
            self.pool.cache(page, digest)

    def order(self, step: int = 0, cost: int = 1) -> list[Sequence]:
        """Run all that wait, each for `cost` tokens."""
        order = []
        while self.queue:
            order.append(self.queue.first(step))
            self.queue.remove(order[-1])
            self.shares.charge(order[-1].request.key, cost)
        return order


def test_one_key_is_served_in_order_of_arrival() -> None:
    queue = Queue(Policy.FCFS)
    sequences = [queue.add() for _ in range(4)]
    assert queue.order() == sequences


def test_further_prompts_of_a_request_let_others_pass() -> None:
    queue = Queue(Policy.FCFS)
    many = [queue.add(turn=make_turn(1, index, index)) for index in range(3)]
    others = [queue.add(turn=make_turn(2 + i, 0, 3 + i)) for i in range(2 * PASSING)]
    order = queue.order()
    assert [order.index(one) for one in many] == [0, PASSING, 2 * PASSING + 1]
    assert [one for one in order if one in others] == others


def test_keys_take_turns_however_much_one_of_them_sends() -> None:
    queue = Queue(Policy.FCFS)
    greedy = [queue.add(key=1) for _ in range(3)]
    modest = [queue.add(key=2) for _ in range(2)]
    assert queue.order() == [greedy[0], modest[0], greedy[1], modest[1], greedy[2]]


def test_idle_key_gains_no_credit() -> None:
    queue = Queue(Policy.FCFS)
    first = queue.add(key=1)
    queue.shares.charge(1, 1000)
    late = [queue.add(key=2) for _ in range(2)]
    second = queue.add(key=1)
    assert queue.order(cost=10) == [first, *late, second]


def test_heavy_key_is_remembered_after_it_left() -> None:
    shares = FairShare()
    shares.enter(1)
    shares.charge(1, 1000)
    shares.leave(1)
    shares.enter(2)
    shares.enter(1)
    assert (shares.served(1), shares.served(2)) == (1000, 0)


def test_only_so_many_absent_keys_are_remembered() -> None:
    shares = FairShare()
    shares.enter(0)
    shares.charge(0, 5)
    for key in range(1, MAX_KEYS + 10):
        shares.enter(key)
        shares.leave(key)
    assert len(shares._served) <= MAX_KEYS + 1
    assert shares.served(0) == 5


def test_priority_goes_before_arrival_and_share() -> None:
    queue = Queue(Policy.PRIORITY)
    low, first, second = queue.add(priority=1), queue.add(priority=-1), queue.add(priority=-1)
    assert queue.order() == [first, second, low]
    assert queue.queue.importance(first) < queue.queue.importance(second)
    assert queue.queue.importance(second) < queue.queue.importance(low)


def test_other_policies_know_no_priority() -> None:
    queue = Queue(Policy.FCFS)
    sequences = [queue.add(priority=1), queue.add(priority=-1)]
    assert queue.order() == sequences


def test_the_longest_known_prefix_goes_first() -> None:
    queue = Queue(Policy.LPM)
    queue.remember(list(range(12)))
    unknown, part, whole = (
        queue.add([9] * 12),
        queue.add(list(range(8))),
        queue.add(list(range(12))),
    )
    assert queue.order() == [whole, part, unknown]


def test_long_waiting_outdoes_a_prefix() -> None:
    queue = Queue(Policy.LPM)
    queue.remember(list(range(12)))
    unknown = queue.add([9] * 12)
    wait = 12 // AGE_TOKENS + 1
    known = queue.add(list(range(12)), step=wait)
    assert queue.order(step=wait) == [unknown, known]
