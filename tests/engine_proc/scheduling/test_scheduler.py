"""The scheduler loses no token, repeats none, and keeps every page accounted for."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import (
    MAX_TOKENS,
    WATCHED,
    FakeWorker,
    Rig,
    by_model,
    by_model_in_its_pages,
    from_text,
    generate_alone,
    half_right,
    make_sequence,
    next_token,
)
from scheduler_stories import LAST_EVENT, Arrival, Story, arrivals, play_out

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler import MAX_WATCHED, Scheduler
from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.scheduling.speculation import Speculation
from headrace.engine_proc.scheduling.waiting_queue import Policy
from headrace.engine_proc.step.step_builder import build_step
from headrace.ipc.messages import FinishReason, request_id
from headrace.ipc.worker_messages import StepResult

DRAFTS = [None, from_text, half_right, by_model, by_model_in_its_pages]


def decoding_rig(num_sequences: int, num_states: int) -> Rig:
    """Return one of four places in which so many sequences decode, two steps at once."""
    rig = Rig.make(32, 4, 64, 4, depth=2, num_states=num_states)
    for id in range(num_sequences):
        rig.add(make_sequence([id], MAX_TOKENS, request_id(0, id), stop_token_ids=[]))
    for _ in range(4):
        rig.step()
    assert len(rig.scheduler.running) == num_sequences
    return rig


@pytest.mark.parametrize("num_waiting", [0, 2])
def test_full_server_looks_ahead_with_three_slots_a_sequence(num_waiting: int) -> None:
    rig = decoding_rig(4, num_states=3 * 4)
    for id in range(4, 4 + num_waiting):
        rig.add(make_sequence([id], MAX_TOKENS, request_id(0, id)))
    num_ahead = rig.scheduler.counts.steps_ahead
    rig.step()
    rig.step()
    assert rig.scheduler.counts.steps_ahead == num_ahead + 2


def test_looking_ahead_yields_where_a_sequence_could_be_admitted() -> None:
    """Two that run leave slots for their next chunks, but none for a third sequence."""
    rig = decoding_rig(2, num_states=7)
    num_ahead = rig.scheduler.counts.steps_ahead
    assert num_ahead > 0
    rig.add(make_sequence([2], MAX_TOKENS, request_id(0, 2), stop_token_ids=[]))
    rig.step()
    rig.step()
    assert rig.scheduler.counts.steps_ahead == num_ahead
    assert len(rig.scheduler.running) == 3


@settings(max_examples=500, deadline=None)
@given(
    script=st.lists(arrivals, min_size=1, max_size=8),
    page_tokens=st.integers(1, 5),
    spare_pages=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    spare_budget=st.integers(0, 20),
    policy=st.sampled_from(Policy),
    speculation=st.sampled_from(DRAFTS),
    reuses_prefixes=st.booleans(),
    deaths=st.sets(st.integers(0, LAST_EVENT), max_size=3),
    failures=st.sets(st.integers(0, LAST_EVENT), max_size=3),
    replacements=st.sets(st.integers(0, LAST_EVENT), max_size=3),
    depth=st.integers(1, 2),
    num_states=st.sampled_from([0, 2, 3, 7, 12, 30]),
)
def test_every_sequence_says_what_it_would_say_alone(
    script: list[Arrival],
    page_tokens: int,
    spare_pages: int,
    max_num_seqs: int,
    spare_budget: int,
    policy: Policy,
    speculation: Callable[[PagePool], Speculation] | None,
    reuses_prefixes: bool,
    deaths: set[int],
    failures: set[int],
    replacements: set[int],
    depth: int,
    num_states: int,
) -> None:
    longest = max(len(p) + a.max_tokens for a in script for p in a.prompts)
    num_pages = -(-longest // page_tokens) + spare_pages
    rig = Rig.make(
        num_pages,
        page_tokens,
        max_num_seqs + spare_budget,
        max_num_seqs,
        depth,
        num_states,
        policy=policy,
        speculation=speculation,
        reuses_prefixes=reuses_prefixes,
    )
    play_out(Story(rig, script), deaths, failures, replacements)


def test_scarce_pages_preempt_and_change_no_token() -> None:
    rig = Rig.make(num_pages=6, page_tokens=2, budget=16, max_num_seqs=4)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for i, prompt in enumerate(prompts):
        rig.add(make_sequence(prompt, 8, request_id(0, i), stop_token_ids=[]))
    rig.run()
    assert rig.scheduler.counts.preemptions > 0
    for i, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(8):
            tokens.append(next_token(tokens))
        assert rig.said[request_id(0, i)] == tokens[3:]


def test_the_last_arrived_is_preempted_and_goes_first_again() -> None:
    rig = Rig.make(num_pages=4, page_tokens=2, budget=16, max_num_seqs=4)
    first, second, third = (
        make_sequence([1, 2, i], 5, request_id(0, i), stop_token_ids=[]) for i in range(3)
    )
    rig.add(first)
    rig.add(second)
    rig.add(third)
    rig.step()
    assert rig.scheduler.running == [first, second]
    while not rig.scheduler.counts.preemptions:
        rig.step()
    assert rig.scheduler.running == [first]
    assert set(rig.scheduler.waiting) == {second, third}
    assert rig.scheduler.waiting.first(0) is second


def test_long_prompt_is_chunked_beside_running_sequences() -> None:
    rig = Rig.make(num_pages=64, page_tokens=4, budget=8, max_num_seqs=4)
    short = make_sequence([1, 2], 30, request_id(0, 1), stop_token_ids=[])
    rig.add(short)
    rig.step()
    long = make_sequence([3] * 20, 4, request_id(0, 2), stop_token_ids=[])
    rig.add(long)
    computed = []
    for _ in range(3):
        news = rig.step()
        computed.append(long.num_computed)
        assert short in [item.sequence for item in news], "decoding waits for no prompt"
    assert computed == [7, 14, 20]
    assert long.num_generated == 1


def test_short_prompt_begins_beside_long_ones() -> None:
    rig = Rig.make(num_pages=256, page_tokens=4, budget=32, max_num_seqs=4)
    for index in range(2):
        rig.add(make_sequence([3 + index] * 200, 1, request_id(0, index), key=1))
    rig.step()
    rig.step()
    short = make_sequence([1, 2], 1, request_id(0, 5), key=2)
    rig.add(short)
    told = [item.sequence for _ in range(3) for item in rig.step()]
    assert short in told, "the long prompts take ten more steps"


def test_short_text_goes_on_beside_many_long_prompts() -> None:
    rig = Rig.make(num_pages=2048, page_tokens=4, budget=32, max_num_seqs=8)
    for index in range(20):
        rig.add(make_sequence([3 + index % 5] * 200, 1, request_id(0, 1) + index))
    rig.step()
    rig.step()
    short = make_sequence([1, 2], 6, request_id(0, 2), stop_token_ids=[])
    rig.add(short)
    told = [item.sequence for _ in range(6) for item in rig.step()]
    assert told.count(short) == 6, "a token in each step, from the first on"


def test_prompts_of_one_step_leave_texts_a_token_each() -> None:
    rig = Rig.make(num_pages=2048, page_tokens=4, budget=32, max_num_seqs=8)
    long = make_sequence([3] * 200, 1, request_id(0, 1))
    rig.add(long)
    rig.step()
    texts = [make_sequence([i, 2], 9, request_id(0, 2 + i), stop_token_ids=[]) for i in range(3)]
    for text in texts:
        rig.add(text)
    for _ in texts:
        rig.step()
    before = long.num_computed
    assert {item.sequence for item in rig.step()} == set(texts)
    assert long.num_computed - before == 32 - len(texts)


def test_the_next_turn_finds_the_answer_of_the_one_before() -> None:
    rig = Rig.make(num_pages=64, page_tokens=4, budget=32, max_num_seqs=2)
    first = make_sequence([1, 2, 3], 10, request_id(0, 1), stop_token_ids=[])
    rig.add(first)
    rig.run()
    assert len(first.tokens) == 3 + 10, "the last token is no input of any step"
    second = make_sequence([*first.tokens, 5, 6, 7], 1, request_id(0, 2), stop_token_ids=[])
    rig.add(second)
    rig.run()
    assert second.num_cached == 12
    other = make_sequence([*first.tokens[:9], 8, 8, 8, 8], 1, request_id(0, 3), stop_token_ids=[])
    rig.add(other)
    rig.run()
    assert other.num_cached == 8, "a template that drops thoughts leaves a common prefix"


def test_sequence_that_does_not_fit_is_not_overtaken() -> None:
    rig = Rig.make(num_pages=8, page_tokens=2, budget=64, max_num_seqs=4)
    rig.add(make_sequence([1] * 10, 2, request_id(0, 1)))
    rig.add(make_sequence([2] * 10, 2, request_id(0, 2)))
    rig.add(make_sequence([3], 1, request_id(0, 3)))
    assert [c.sequence.id for c in rig.scheduler.schedule()] == [request_id(0, 1)]


def test_no_more_than_max_num_seqs_run() -> None:
    rig = Rig.make(num_pages=64, page_tokens=4, budget=8, max_num_seqs=2)
    for i in range(4):
        rig.add(make_sequence([1, 2], 2, request_id(0, i), stop_token_ids=[]))
    rig.step()
    assert (len(rig.scheduler.running), len(rig.scheduler.waiting)) == (2, 2)


def test_stop_token_ends_a_sequence_and_is_its_last_token() -> None:
    rig = Rig.make(num_pages=4, page_tokens=4, budget=8, max_num_seqs=1)
    rig.add(make_sequence([1, 2], 8, stop_token_ids=[next_token([1, 2])]))
    rig.run()
    assert list(rig.said.values()) == [[next_token([1, 2])]]
    assert list(rig.finished.values()) == [FinishReason.STOP]


def test_aborted_request_returns_its_pages() -> None:
    rig = Rig.make(num_pages=16, page_tokens=4, budget=32, max_num_seqs=2)
    sequences = [make_sequence([1] * 9, 9, request_id(0, 1) + i) for i in range(3)]
    for sequence in sequences:
        rig.add(sequence)
    rig.step()
    assert rig.pool.num_free < rig.pool.num_pages
    assert rig.scheduler.abort(request_id(0, 1)) == sequences, "running and waiting ones"
    assert rig.pool.num_free == rig.pool.num_pages
    assert not rig.scheduler.has_work


def test_abort_leaves_other_requests_alone() -> None:
    rig = Rig.make(num_pages=16, page_tokens=4, budget=32, max_num_seqs=4)
    rig.add(make_sequence([1, 2], 4, request_id(0, 1)))
    rig.add(make_sequence([1, 2], 4, request_id(0, 2)))
    rig.scheduler.abort(request_id(0, 1))
    rig.run()
    assert rig.said[request_id(0, 1)] == []
    assert rig.said[request_id(0, 2)] == generate_alone([1, 2], 4)[0]


def test_ending_what_has_ended_does_nothing() -> None:
    rig = Rig.make(num_pages=4, page_tokens=4, budget=8, max_num_seqs=1)
    rig.add(make_sequence([1, 2], 1))
    rig.run()
    assert rig.scheduler.end(request_id(0, 1)) is None
    assert rig.scheduler.abort(request_id(0, 1)) == []


def test_a_known_prefix_is_not_computed_again() -> None:
    rig = Rig.make(num_pages=8, page_tokens=4, budget=64, max_num_seqs=2)
    prompt = list(range(10))
    rig.add(make_sequence(prompt, 3, request_id(0, 0)))
    rig.run()
    again = make_sequence([*prompt, 3, 1], 3, request_id(0, 1))
    rig.add(again)
    chunks = rig.scheduler.schedule()
    assert [(chunk.start, chunk.count) for chunk in chunks] == [(8, 4)]
    assert again.num_cached == 8


def test_a_prompt_known_in_full_has_one_page_computed_again() -> None:
    rig = Rig.make(num_pages=8, page_tokens=4, budget=64, max_num_seqs=2)
    for counter in range(2):
        rig.add(make_sequence(list(range(8)), 2, request_id(0, counter)))
        chunks = rig.scheduler.schedule()
        rig.scheduler.update(chunks, rig.worker.run(chunks))
    assert [(chunk.start, chunk.count) for chunk in chunks][1:] == [(4, 4)]


def test_running_sequences_share_the_pages_of_their_prefix() -> None:
    rig = Rig.make(num_pages=8, page_tokens=4, budget=64, max_num_seqs=4)
    first = make_sequence(list(range(9)), 4, request_id(0, 0))
    second = make_sequence(list(range(9)), 4, request_id(0, 1))
    rig.add(first)
    rig.step()
    rig.add(second)
    rig.step()
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    rig.run()
    assert rig.pool.num_free == rig.pool.num_pages


def test_guesses_save_steps_and_change_no_token() -> None:
    prompt = [1, 2, 3, 4] * 4
    steps = []
    for speculation in (None, from_text):
        rig = Rig.make(64, 4, 32, 4, speculation=speculation)
        rig.worker = RepeatingWorker(rig.pool)
        rig.add(make_sequence(prompt, 40, stop_token_ids=[]))
        rig.run()
        assert rig.said[request_id(0, 1)] == prompt[:4] * 10
        steps.append(rig.scheduler.counts.steps)
    counts = rig.scheduler.counts
    assert counts.accepted_drafts == counts.drafts == sum(counts.right_at) > 0
    assert counts.right_at[0] == counts.draft_rounds > counts.right_at[-1]
    assert steps[0] == 40
    assert steps[1] <= 8


class RepeatingWorker(FakeWorker):
    """A model that goes on as the text did four tokens ago."""

    def next_token(self, tokens: list[int]) -> int:
        return tokens[-4]


def test_steps_are_sent_ahead_while_nothing_is_guessed() -> None:
    rig = Rig.make(256, 4, 32, 4, depth=2, speculation=from_text)
    rig.worker = CountingWorker(rig.pool)
    rig.add(make_sequence([1], 100, stop_token_ids=[]))
    rig.run()
    assert list(rig.said.values()) == [list(range(2, 102))]
    assert rig.scheduler.counts.steps_ahead > 80


def test_guesses_begin_soon_after_steps_sent_ahead() -> None:
    rig = Rig.make(256, 4, 32, 4, depth=2, speculation=from_text)
    rig.worker = CountingWorker(rig.pool, period=60)
    rig.add(make_sequence([1], 240, stop_token_ids=[]))
    rig.run()
    assert rig.said[request_id(0, 1)] == [place % 60 for place in range(2, 242)]
    assert rig.scheduler.counts.steps_ahead > 30
    assert rig.scheduler.counts.steps < 150, "from the second period on, several tokens a step"


class CountingWorker(FakeWorker):
    """A model that counts, and begins again."""

    def __init__(self, pool: PagePool, period: int = 1000) -> None:
        super().__init__(pool)
        self._period = period

    def next_token(self, tokens: list[int]) -> int:
        return (tokens[-1] + 1) % self._period


def test_guesses_end_with_the_text() -> None:
    rig = Rig.make(64, 4, 32, 4, speculation=from_text)
    rig.worker = RepeatingWorker(rig.pool)
    rig.add(make_sequence([1, 2, 3, 4] * 2, 40, stop_token_ids=[3]))
    rig.run()
    assert list(rig.said.values()) == [[1, 2, 3]]
    assert list(rig.finished.values()) == [FinishReason.STOP]


def test_the_cache_off_finds_nothing() -> None:
    rig = Rig.make(16, 4, 64, 2, reuses_prefixes=False)
    for counter in range(2):
        rig.add(make_sequence(list(range(10)), 2, request_id(0, counter)))
        rig.run()
    assert rig.scheduler.counts.prefix_hits == 0


def test_hits_are_counted_in_tokens() -> None:
    rig = Rig.make(16, 4, 64, 2)
    for counter in range(2):
        rig.add(make_sequence(list(range(10)), 2, request_id(0, counter)))
        rig.run()
    counts = rig.scheduler.counts
    assert (counts.prefix_queries, counts.prefix_hits) == (20, 8)


def test_another_salt_finds_nothing() -> None:
    rig = Rig.make(16, 4, 64, 2)
    for counter, salt in enumerate([b"", b"mine", b"mine"]):
        rig.add(make_sequence(list(range(10)), 2, request_id(0, counter), salt=salt))
        rig.run()
    assert rig.scheduler.counts.prefix_hits == 8


def test_a_smaller_budget_makes_smaller_chunks() -> None:
    rig = Rig.make(64, 4, 64, 4)
    rig.add(make_sequence([1] * 40, 4))
    assert [chunk.count for chunk in rig.scheduler.schedule(12)] == [12]


def test_a_watched_prompt_is_computed_in_small_chunks() -> None:
    rig = Rig.make(64, 4, 256, 4)
    rig.add(make_sequence([1] * 200, 4, sampling=WATCHED))
    assert [chunk.count for chunk in rig.scheduler.schedule()] == [MAX_WATCHED]


def test_the_queue_says_when_it_is_full() -> None:
    pool = PagePool(16, 4)
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=8, max_num_queued=2)
    scheduler = Scheduler(pool, limits)
    for counter in range(2):
        assert not scheduler.is_full
        scheduler.add(make_sequence([1, 2], 2, request_id(0, counter)))
    assert scheduler.is_full
    scheduler.schedule()
    assert not scheduler.is_full


def test_whole_prompts_are_not_cut_and_not_shared() -> None:
    pool = PagePool(64, 4)
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=20, whole_prompts=True)
    scheduler = Scheduler(pool, limits)
    for counter in range(3):
        scheduler.add(make_sequence([1] * 9, 1, request_id(0, counter), embeds=True))
    chunks = scheduler.schedule()
    assert [(chunk.start, chunk.count) for chunk in chunks] == [(0, 9), (0, 9)]
    news = scheduler.update(chunks, ResultReader(StepResult(b"", b"", b"aaaabbbb"), 2))
    assert [item.embedding for item in news] == [b"aaaa", b"bbbb"]
    assert [item.finished for item in news] == [FinishReason.STOP] * 2
    assert [(chunk.start, chunk.count) for chunk in scheduler.schedule()] == [(0, 9)]


def test_a_prefix_lm_s_prompt_is_whole_beside_decodes() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=20, whole_prompts=True)
    rig = Rig(pool := PagePool(64, 4), Scheduler(pool, limits), 20, 4)
    rig.add(make_sequence([1, 2, 3], 6, request_id(0, 0), stop_token_ids=[]))
    rig.step()
    rig.add(make_sequence([4] * 18, 6, request_id(0, 1), stop_token_ids=[]))
    chunks = rig.scheduler.schedule(budget=2)  # as where decodes are to be quick
    assert [(chunk.start, chunk.count) for chunk in chunks] == [(3, 1), (0, 18)]
    step = build_step(chunks)
    assert array("i", step.last_seen).tolist() == [3, *[17] * 18]
    rig.scheduler.retry()
    rig.scheduler.recompute()  # what was generated sees no later tokens, as when it was
    (first, *_) = rig.scheduler.schedule()
    assert array("i", build_step([first]).last_seen).tolist() == [2, 2, 2, 3]


def test_preempted_sequence_skips_the_same_step() -> None:
    rig = Rig.make(num_pages=4, page_tokens=2, budget=16, max_num_seqs=4)
    for i in range(2):
        rig.add(make_sequence([1, 2, i], 5, request_id(0, i), stop_token_ids=[]))
    while not rig.scheduler.counts.preemptions:
        assert len(rig.scheduler.running) <= 2
        rig.step()
    assert [s.id for s in rig.scheduler.running] == [request_id(0, 0)]


def test_the_unimportant_is_preempted() -> None:
    rig = Rig.make(4, 2, 16, 4, policy=Policy.PRIORITY)
    low = make_sequence([1, 2, 0], 5, request_id(0, 0), stop_token_ids=[], priority=1)
    high = make_sequence([1, 2, 1], 5, request_id(0, 1), stop_token_ids=[], priority=0)
    rig.add(low)
    rig.step()
    rig.add(high)
    while not rig.scheduler.counts.preemptions:
        rig.step()
    assert rig.scheduler.running == [high]


def test_prompts_that_come_together_are_computed_once() -> None:
    rig = Rig.make(num_pages=64, page_tokens=4, budget=10, max_num_seqs=8)
    for counter in range(8):
        rig.add(make_sequence(list(range(32)), 2, request_id(0, counter), stop_token_ids=[]))
    while rig.scheduler.running or rig.scheduler.waiting:
        rig.step()
    counts = rig.scheduler.counts
    # What one has computed while another was at it is not computed to its end.
    assert counts.prefix_hits >= 7 * 28 - 10
