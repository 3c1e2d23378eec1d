"""Drafts from a text: a copy is drafted with the edits that it makes."""

from array import array

from scheduler_rig import make_sequence

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.scheduling.speculation import Speculation
from headrace.engine_proc.sequence.chunk import NO_TOKENS, Chunk
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.step.step_builder import build_step
from headrace.ipc.messages import request_id
from headrace.ipc.worker_messages import StepResult

SOURCE = [20, 21, 22, 23, 24, 25, 9, 26, 27, 28, 29, 9, 30, 31]


def decoding(tokens: list[int]) -> Sequence:
    """Return a sequence whose last token is to be computed."""
    sequence = make_sequence(tokens, 50)
    sequence.num_prompt = len(SOURCE)
    sequence.num_computed = len(tokens) - 1
    return sequence


def drafted(speculation: Speculation, sequence: Sequence) -> list[int]:
    assert speculation.next_chunks([sequence], 64) == []
    return speculation.propose(sequence, 15).tolist()


def test_copy_is_drafted_with_its_edits() -> None:
    speculation = Speculation()
    sequence = decoding([*SOURCE, 20, 21, 22, 23])
    chunk = Chunk(sequence, 0, 1, NO_TOKENS, is_last=True)
    speculation.observe([chunk], 0.1)  # rows cost little
    for news, expected in (([], [24, 25, 9]), ([24, 25, 50], [26, 27]), ([26], [27, 28, 29, 50])):
        sequence.tokens.extend(news)
        sequence.num_computed = len(sequence.tokens) - 1
        sequence.num_expected = len(sequence.tokens)
        assert drafted(speculation, sequence)[: len(expected)] == expected


def test_prompts_leave_drafts_what_they_do_not_need() -> None:
    speculation = Speculation()
    sequence = decoding([*SOURCE, 20, 21, 22, 23])
    speculation.observe([Chunk(sequence, 0, 1, NO_TOKENS, is_last=True)], 0.1)
    prompt = make_sequence([40] * 100, 5)
    assert speculation.needs_no_answer([sequence, prompt], 64), "the step behind has no drafts"
    assert not speculation.needs_no_answer([sequence, prompt], 103)
    for budget, num_drafts in ((64, 0), (101, 0), (103, 2)):
        assert speculation.next_chunks([sequence, prompt], budget) == []
        assert len(speculation.propose(sequence, 15)) == num_drafts
        speculation.drop_plan()


def test_drafts_take_no_rows_of_a_waiting_prompt() -> None:
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=32)
    scheduler = Scheduler(PagePool(16, 16), limits, speculation=Speculation())
    scheduler.add(make_sequence([*SOURCE, 20, 21, 22], 50, request_id(0, 1)))
    assert take(scheduler, 23) == take(scheduler, 24) == [], "no cost is known"
    assert take(scheduler, 25) != [], "rows cost little, and the text repeats itself"
    scheduler.add(make_sequence([40] * 100, 5, request_id(0, 2)))
    assert take(scheduler, 27) == []
    assert [chunk.count for chunk in scheduler.schedule()] == [1, 31]


def take(scheduler: Scheduler, token: int) -> list[int]:
    """Run a step that draws a token, and those that follow it, for each row; return its drafts."""
    chunks = scheduler.schedule()
    step = build_step(chunks)
    scheduler.observe(chunks, 0.1)
    drawn = array("i", range(token, token + len(step.logit_rows) // 4))
    scheduler.update(chunks, ResultReader(StepResult(drawn.tobytes(), b""), 0))
    return [token for chunk in chunks for token in chunk.drafts]
