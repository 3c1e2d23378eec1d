"""Stages of a pipeline compute several steps at once, of different sequences."""

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import MAX_TOKENS, Rig, generate_alone, make_sequence
from scheduler_stories import LAST_EVENT, Arrival, Story, arrivals, play_out

from headrace.ipc.messages import request_id


@settings(max_examples=100, deadline=None)
@given(
    script=st.lists(arrivals, min_size=1, max_size=8),
    page_tokens=st.integers(1, 5),
    spare_pages=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    spare_budget=st.integers(0, 20),
    deaths=st.sets(st.integers(0, LAST_EVENT), max_size=3),
    failures=st.sets(st.integers(0, LAST_EVENT), max_size=3),
    replacements=st.sets(st.integers(0, LAST_EVENT), max_size=3),
    num_stages=st.integers(2, 4),
)
def test_stages_of_a_pipeline_change_no_token(
    script: list[Arrival],
    page_tokens: int,
    spare_pages: int,
    max_num_seqs: int,
    spare_budget: int,
    deaths: set[int],
    failures: set[int],
    replacements: set[int],
    num_stages: int,
) -> None:
    longest = max(len(p) + a.max_tokens for a in script for p in a.prompts)
    num_pages = -(-longest // page_tokens) + spare_pages
    budget = max_num_seqs + spare_budget
    rig = Rig.make(
        num_pages, page_tokens, budget, max_num_seqs, depth=num_stages, num_stages=num_stages
    )
    play_out(Story(rig, script), deaths, failures, replacements)


def test_stages_have_as_many_sequences_each() -> None:
    rig = Rig.make(64, 4, 64, 8, depth=2, num_stages=2)
    for id in range(5):
        rig.add(make_sequence([id, 1], MAX_TOKENS, request_id(0, id), stop_token_ids=[]))
    sizes = []
    for _ in range(8):
        rig.step()
        sizes.append([len(chunks) for chunks, _ in rig.open])
    assert sizes == [[3], [2], *[[3], [2]] * 3]


def test_a_sequence_in_a_stage_waits_for_its_token() -> None:
    rig = Rig.make(64, 4, 64, 8, depth=2, num_stages=2)
    rig.add(make_sequence([1, 2, 3], 4, stop_token_ids=[]))
    assert rig.start()
    assert not rig.start(), "its token is not known"
    while rig.scheduler.has_work:
        rig.step()
    assert [*rig.said.values()] == [generate_alone([1, 2, 3], 4)[0]]


def test_a_sequence_whose_token_is_in_a_stage_is_generating() -> None:
    rig = Rig.make(64, 4, 64, 8, depth=2, num_stages=2)
    rig.add(make_sequence([1, 2, 3], 4, stop_token_ids=[]))
    assert not rig.scheduler.is_generating
    rig.start()
    rig.add(make_sequence([*range(20)], 1))
    assert rig.scheduler.is_generating, "the prompt's step may not take long"


def test_chunks_of_a_prompt_are_in_several_stages() -> None:
    rig = Rig.make(64, 4, 8, 8, depth=3, num_stages=3)
    rig.add(make_sequence([*range(20)], 1))
    assert [rig.start() for _ in range(4)] == [True, True, True, False]
    assert [chunks[0].start for chunks, _ in rig.open] == [0, 8, 16]


def test_a_sequence_in_no_stage_is_preempted_beside_others() -> None:
    rig = Rig.make(6, 4, 64, 8, depth=2, num_stages=2)
    prompts = {request_id(0, first): [first, 1, 2, 3] for first in (1, 3, 5, 7)}
    for id, prompt in prompts.items():
        rig.add(make_sequence(prompt, 8, id))
    for _ in range(3):
        rig.step()
    assert rig.start(), "the third sequence takes the page of the fourth"
    assert rig.scheduler.counts.preemptions == 1
    owners = [[chunk.sequence.tokens[0] for chunk in chunks] for chunks, _ in rig.open]
    assert owners == [[1, 3], [5]]
    rig.run()
    assert rig.said == {id: generate_alone(prompt, 8)[0] for id, prompt in prompts.items()}
