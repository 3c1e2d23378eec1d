"""The engine between its links: what it takes, refuses, drops and tells."""

import math
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from engine_rig import FIRST, READY, WAIT_MS, Rig, Sevens, Slow, Small, generate

from headrace.board.board import Timing
from headrace.board.fields import EngineField
from headrace.engine_proc.grammars import MatcherQueue
from headrace.engine_proc.main import make_pool
from headrace.engine_proc.request_io.intake import LAPSE_S
from headrace.engine_proc.request_io.leases import LEASE_S
from headrace.errors import ConfigError
from headrace.ipc.messages import (
    Abort,
    FinishReason,
    GeneratedTokens,
    GenerateRequest,
    RenewLeases,
    Sampling,
    StopSequence,
    request_id,
)
from headrace.ipc.token_logprobs import TokenLogprob
from headrace.ipc.worker_messages import StepFailed, StepResult, WorkerReady
from headrace.model.grammar_compiler import GrammarCompiler


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


def test_the_board_has_the_sequences_when_there_is_time(rig: Rig) -> None:
    def told(*spans: Timing) -> list[int]:
        return [sum(rig.slot.histogram(span).counts) for span in spans]

    rig.take(generate())
    rig.step()
    assert (told(Timing.STEP), rig.slot[EngineField.PREFILLED_TOKENS]) == ([1], 0)
    rig.step()
    assert rig.slot[EngineField.PREFILLED_TOKENS] == 3
    assert told(Timing.GENERATED, Timing.BETWEEN) == [0, 0]
    rig.take(StopSequence(FIRST))  # nothing is left to do
    assert told(Timing.GENERATED, Timing.BETWEEN, Timing.WAITED, Timing.STEP) == [1, 1, 1, 2]
    assert rig.slot[EngineField.ENDED + FinishReason.LENGTH] == 1
    assert rig.slot[EngineField.PAGE_TOKENS] == READY.page_tokens


def test_end_by_a_stop_string_is_reported_at_once(rig: Rig) -> None:
    rig.take(generate())
    rig.step()
    rig.take(StopSequence(FIRST))
    assert rig.slot[EngineField.ENDED + FinishReason.STOP] == rig.slot[EngineField.FINISHED] == 1
    assert rig.slot.histogram(Timing.GENERATED).sum == 1


def test_tokens_go_to_the_detokenizer_of_their_sequence(rig: Rig) -> None:
    other = request_id(0, 2)
    rig.take(generate(), generate(other, detokenizer=1))
    rig.step()
    output, tokens = rig.heard()
    assert output.started == {FIRST: b"plan %d" % FIRST}
    assert (list(output.rows()), tokens) == ([(FIRST, 1, None)], [7])
    assert output.logprobs == {FIRST: TokenLogprob(0, 1, []).pack()}
    assert [id for id, _, _ in rig.heard(1)[0].rows()] == [other]
    rig.step()
    output, tokens = rig.heard()
    assert (output.started, tokens) == ({}, [7])
    assert list(output.rows()) == [(FIRST, 1, FinishReason.LENGTH)]


def test_sequence_resumes_after_its_worker_died(rig: Rig) -> None:
    rig.take(generate())
    dying, other = Sevens(lives=1), Sevens()
    for workers in (dying, dying, dying, other):
        rig.engine.run_once(workers)  # type: ignore[arg-type]
    rig.links.flush()
    assert dying.events == ["start", "finish", "start", "worker 0 died"]
    assert other.events == ["start", "finish"]
    assert len(other.step.token_ids) == 4 * len([1, 2, 3, 7])
    assert [rig.heard()[1] for _ in range(2)] == [[7], [7]]
    assert not rig.scheduler.has_work


def test_a_request_at_which_workers_die_twice_fails_alone(rig: Rig) -> None:
    other = request_id(0, 2)
    rig.take(generate(FIRST), generate(FIRST + 1), generate(other, detokenizer=1))
    deaths = [Sevens(lives=0) for _ in range(3)]
    for dying in deaths:
        rig.engine.run_once(dying)  # type: ignore[arg-type]
    assert [dying.blamed for dying in deaths] == [
        ([FIRST, other], False),  # as many as run at once
        ([FIRST], False),
        ([FIRST], True),
    ]
    assert list(rig.scheduler.requests) == [other]
    rig.links.flush()
    output, _ = rig.heard()
    assert output.failed == {FIRST: b"plan %d" % FIRST}
    assert list(output.rows()) == [(FIRST, 0, FinishReason.ABORT)]
    rig.step()
    assert rig.heard(1)[1] == [7]


def test_chaos_blames_no_request(rig: Rig) -> None:
    rig.take(generate())
    deaths = [Sevens(lives=0, is_chaos=True) for _ in range(4)]
    for dying in deaths:
        rig.engine.run_once(dying)  # type: ignore[arg-type]
    assert [dying.blamed for dying in deaths] == [([FIRST], True)] * 4
    for _ in range(2):
        rig.step()
    assert [rig.heard()[1] for _ in range(2)] == [[7], [7]]


ahead = pytest.mark.parametrize("rig", [{"ahead_s": math.inf}], indirect=True)


@pytest.mark.parametrize("rig", [{}, {"ahead_s": math.inf}], indirect=True)
def test_the_board_says_when_the_step_that_is_open_is_overdue(rig: Rig) -> None:
    rig.take(GenerateRequest(FIRST, 0, 9, Sampling(), [], b""))
    due = []

    class Witness(Sevens):
        def finish(self, patience_s: float | None = None) -> StepResult | StepFailed:
            due.append(rig.slot[EngineField.STEP_DUE_NS])
            return super().finish()

    workers = Witness()
    while rig.scheduler.has_work:
        rig.engine.run_once(workers)  # type: ignore[arg-type]
    assert due[0] == 0, "no step is known to be long before there was one"
    assert all(due[1:])
    assert rig.slot[EngineField.STEP_DUE_NS] == 0
    assert 0 < rig.slot[EngineField.STEPPED_NS] < due[-1]
    rig.take(generate(request_id(0, 2)))
    rig.workers = Sevens(lives=0)
    for _ in range(2):
        rig.turn()
    assert rig.workers.lives < 0, "they have died"
    assert rig.slot[EngineField.STEP_DUE_NS] == 0, "no worker computes the step"


@ahead
def test_a_step_is_sent_before_the_last_has_its_result(rig: Rig) -> None:
    rig.take(*(GenerateRequest(FIRST + i, 0, 2 + i, Sampling(), [], b"") for i in range(2)))
    turns = [rig.turn().copy() for _ in range(4)]
    assert turns == [["start"], ["start", "finish"], ["start", "finish"], ["finish"]]
    assert rig.heard()[1] == [7, 7]
    output, tokens = rig.heard()
    assert list(output.rows()) == [(FIRST, 1, FinishReason.LENGTH), (FIRST + 1, 1, None)]
    assert tokens == [7, 7]
    assert (list(rig.heard()[0].rows()), rig.turn()) == (
        [(FIRST + 1, 1, FinishReason.LENGTH)],
        [],
    ), "no sequence is computed past its end"
    assert (rig.slot[EngineField.STEPS], rig.slot[EngineField.STEPS_AHEAD]) == (3, 2)


@ahead
def test_sequence_aborted_during_a_step_says_nothing_more(rig: Rig) -> None:
    stopping = GenerateRequest(FIRST, 0, 9, Sampling(logprobs=0), [7], b"")
    rig.take(stopping, generate(request_id(0, 2)))
    assert [rig.turn().copy() for _ in range(2)] == [["start"], ["start", "finish"]]
    assert [end for _, _, end in rig.heard()[0].rows()] == [FinishReason.STOP, None]
    assert rig.turn() == ["finish"]
    output, tokens = rig.heard()
    assert list(output.rows()) == [(request_id(0, 2), 1, FinishReason.LENGTH)]
    assert tokens == [7]
    assert rig.slot[EngineField.PAGES_FREE] == rig.slot[EngineField.PAGES_TOTAL]


@ahead
def test_abort_ends_a_step_without_live_sequences(rig: Rig) -> None:
    rig.take(generate())
    rig.turn()
    rig.take(Abort(FIRST))
    assert rig.scheduler.has_work, "its pages are still being written to"
    assert rig.turn() == ["finish"]
    assert list(rig.heard()[0].rows()) == [(FIRST, 0, FinishReason.ABORT)]
    assert not rig.scheduler.has_work
    assert rig.slot[EngineField.PAGES_FREE] == rig.slot[EngineField.PAGES_TOTAL]


@ahead
def test_bad_words_wait_for_the_token_before(rig: Rig) -> None:
    rig.take(generate(bad_words=[[1, 2]]))
    assert [rig.turn().copy() for _ in range(4)] == [["start"], ["finish"], ["start"], ["finish"]]
    assert rig.slot[EngineField.STEPS_AHEAD] == 0


@ahead
def test_penalties_do_not(rig: Rig) -> None:
    rig.take(generate(repetition_penalty=2.0))
    assert [rig.turn().copy() for _ in range(3)] == [["start"], ["start", "finish"], ["finish"]]


@ahead
def test_masks_are_made_once_the_token_before_is_known(rig: Rig, compiler: Slow) -> None:
    compiler.let.set()
    rig.take(with_grammar(FIRST))
    receive_compiled(rig)
    turns = [rig.turn().copy() for _ in range(3)]
    assert turns == [["start", "masks"], ["start", "finish", "masks"], ["finish"]]


@ahead
def test_both_steps_of_workers_that_die_are_computed_again(rig: Rig) -> None:
    rig.take(*(GenerateRequest(FIRST + i, 0, 3, Sampling(), [], b"") for i in range(2)))
    rig.turn()
    rig.workers.lives = 0
    assert rig.turn() == ["start", "worker 0 died"]
    assert rig.workers.blamed == ([FIRST, FIRST + 1], False)
    assert rig.scheduler.ids_in_step == []
    rig.workers = Sevens()
    said = []
    while rig.scheduler.has_work:
        rig.turn()
    while len(said) < 6:
        said += rig.heard()[1]
    assert said == [7] * 6


def test_a_step_without_memory_is_computed_in_smaller_ones(rig: Rig) -> None:
    other = request_id(0, 2)
    rig.take(generate(), generate(other), prompt=tuple(range(20)))
    workers = Small(16)
    for _ in range(6):
        rig.engine.run_once(workers)  # type: ignore[arg-type]
    rig.links.flush()
    # Of both 20 at once, then of 20, and of 10; the prefix of 16 that they share is computed once.
    assert workers.sizes == [40, 20, 10, 10, 5, 1]
    assert workers.events.count("resume") == 2
    told = [(list(output.rows()), tokens) for output, tokens in (rig.heard() for _ in range(3))]
    assert told == [
        ([(FIRST, 1, None)], [7]),
        ([(FIRST, 1, FinishReason.LENGTH), (other, 1, None)], [7, 7]),
        ([(other, 1, FinishReason.LENGTH)], [7]),
    ]
    assert not rig.scheduler.has_work


@ahead
def test_both_steps_of_workers_without_memory_are_computed_again(rig: Rig) -> None:
    other = request_id(0, 2)
    plain = [GenerateRequest(id, 0, 3, Sampling(), [], b"plan") for id in (FIRST, other)]
    rig.take(*plain, prompt=tuple(range(20)))
    rig.workers = workers = Small(16)
    while rig.scheduler.has_work:
        rig.turn()
    # The second 2 are the step that was sent after that of 20, whose tokens it would have had.
    assert workers.sizes[:3] == [40, 2, 20]
    assert max(workers.sizes[4:]) == 10
    said: dict[int, int] = {}
    while sum(said.values()) < 6:
        output, tokens = rig.heard()
        assert set(tokens) == {7}
        for id, count, _ in output.rows():
            said[id] = said.get(id, 0) + count
    assert said == {FIRST: 3, other: 3}
    assert rig.slot[EngineField.PAGES_FREE] == rig.slot[EngineField.PAGES_TOTAL]


def test_workers_out_of_memory_blame_no_request(rig: Rig) -> None:
    rig.take(generate(), generate(request_id(0, 2)), prompt=tuple(range(20)))
    dying = [Small(0, dies=True) for _ in range(4)]
    for workers in dying:
        rig.engine.run_once(workers)  # type: ignore[arg-type]
    assert [workers.sizes for workers in dying] == [[40], [20], [10], [5]]
    assert all(workers.blamed[1] for workers in dying)
    assert len(rig.scheduler.waiting) + len(rig.scheduler.running) == 2
    for _ in range(20):
        rig.step()
    assert not rig.scheduler.has_work


def test_what_cannot_be_cut_and_has_no_memory_fails_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ready=WorkerReady(16, 16, whole_prompts=True))
    other = request_id(0, 2)
    rig.take(generate(), prompt=tuple(range(20)))
    rig.take(generate(other), prompt=tuple(range(9)))
    workers = Small(12)
    for _ in range(4):
        rig.engine.run_once(workers)  # type: ignore[arg-type]
    rig.links.flush()
    assert workers.sizes == [29, 20, 9, 1]
    output, _ = rig.heard()
    assert output.failed == {FIRST: b"plan %d" % FIRST}
    assert [id for id, _, _ in rig.heard()[0].rows()] == [other]
    rig.close()


def test_a_request_that_comes_again_goes_on_under_its_new_id(rig: Rig) -> None:
    rig.take(GenerateRequest(FIRST, 0, 3, Sampling(), [], b"plan"))
    rig.step()
    again = request_id(0, 2)
    rig.take(GenerateRequest(again, 1, 3, Sampling(), [], b"other plan", resumes=FIRST))
    rig.step()
    told = [list(rig.heard()[0].rows()) for _ in range(2)]
    assert told == [[(FIRST, 1, None)], [(FIRST, 0, FinishReason.ABORT)]]
    output, tokens = rig.heard(1)
    assert (output.started, tokens) == ({again: b"other plan"}, [7])
    output, tokens = rig.heard(1)
    assert (output.started, tokens, list(output.rows())) == ({}, [7], [(again, 1, None)])
    rig.take(GenerateRequest(FIRST, 0, 3, Sampling(), [], b"plan"))
    assert [s.id for s in rig.scheduler.running] == [again]
    assert not rig.scheduler.waiting, "what comes late for the old id is dropped"


def test_resent_finished_sequence_is_not_generated_again(rig: Rig) -> None:
    rig.take(generate())
    rig.step()
    rig.step()
    assert [rig.heard()[1] for _ in range(2)] == [[7], [7]]
    assert not rig.scheduler.has_work
    again = request_id(0, 2)
    rig.take(GenerateRequest(again, 0, 2, Sampling(), [], b"plan", resumes=FIRST))
    # A detokenizer that has come in between may have begun a response with what it heard of it.
    assert list(rig.heard()[0].rows()) == [(FIRST, 0, FinishReason.ABORT)]
    (sequence,) = rig.scheduler.waiting
    assert sequence.generated.tolist() == [7]


def test_what_a_dead_engine_had_generated_is_taken_up(rig: Rig) -> None:
    said = GeneratedTokens(array("Q", [FIRST]).tobytes(), array("I", [2]).tobytes())
    rig.engine._take(said, array("I", [7, 8]).tobytes())
    again = request_id(0, 2)
    rig.take(GenerateRequest(again, 0, 4, Sampling(), [], b"plan", resumes=FIRST))
    rig.step()
    assert [rig.heard()[1] for _ in range(2)] == [[7, 8], [7]]
    (sequence,) = rig.scheduler.running
    assert sequence.generated.tolist() == [7, 8, 7]


@pytest.mark.parametrize(("said", "kept"), [([5, 9], [5]), ([5, 6, 7], [5, 6]), ([9], [])])
def test_the_last_token_of_a_text_is_drawn_again_with_its_end(
    rig: Rig, said: list[int], kept: list[int]
) -> None:
    header = GeneratedTokens(array("Q", [FIRST]).tobytes(), array("I", [len(said)]).tobytes())
    rig.engine._take(header, array("I", said).tobytes())
    again = GenerateRequest(request_id(0, 2), 0, 3, Sampling(), [9], b"", resumes=FIRST)
    rig.take(again)
    (sequence,) = rig.scheduler.waiting
    assert sequence.generated.tolist() == kept


def test_log_probabilities_are_reported_anew(rig: Rig) -> None:
    rig.take(generate())
    rig.step()
    rig.heard()
    again = request_id(0, 2)
    sampling = Sampling(logprobs=0)
    rig.take(GenerateRequest(again, 1, 2, sampling, [], b"plan", resumes=FIRST))
    rig.step()
    output, tokens = rig.heard(1)
    assert (output.started, tokens, len(output.logprobs[again])) == ({again: b"plan"}, [7], 8)


def test_the_death_of_an_idle_worker_is_noticed(rig: Rig) -> None:
    dead = Sevens(lives=0)
    rig.engine.run_once(dead)  # type: ignore[arg-type]
    assert dead.events == ["worker 0 died"]


def test_messages_are_taken_while_workers_load(rig: Rig) -> None:
    rig.take(generate())
    loading = Sevens(lives=-1)
    rig.engine.run_once(loading)  # type: ignore[arg-type]
    rig.take(Abort(FIRST))
    assert not loading.events
    assert not rig.scheduler.has_work


def test_prompts_are_reported_with_their_log_probabilities(rig: Rig) -> None:
    rig.take(generate(prompt_logprobs=0))
    rig.step()
    output, _ = rig.heard()
    assert output.prompts == {FIRST: array("I", [1, 2, 3]).tobytes()}
    assert output.prompt_logprobs == {FIRST: TokenLogprob(0, 1, []).pack() * 2}
    rig.step()
    assert rig.heard()[0].prompts == {}


@pytest.mark.parametrize("rig", [{"max_num_queued": 1}], indirect=True)
def test_a_request_beyond_the_queue_is_refused_whole(rig: Rig) -> None:
    rig.take(generate(FIRST), generate(FIRST + 1))
    late = request_id(0, 2)
    rig.take(generate(late), generate(late + 1))
    output, tokens = rig.heard()
    assert output.started == {late: b"plan %d" % late}
    assert (list(output.rows()), tokens) == ([(late, 0, FinishReason.REFUSED)], [])
    assert {sequence.id for sequence in rig.scheduler.waiting} == {FIRST, FIRST + 1}
    assert rig.slot[EngineField.QUEUE_REFUSALS] == 1


@pytest.mark.parametrize("rig", [{"max_num_queued": 1}], indirect=True)
def test_resent_request_bypasses_the_queue_limit(rig: Rig) -> None:
    first, again = request_id(0, 5), request_id(0, 6)
    rig.take(generate(first))
    rig.take(GenerateRequest(again, 0, 2, Sampling(), [], b"", resumes=FIRST))
    assert [s.id for s in rig.scheduler.waiting] == [first, again]


def test_an_abort_that_overtakes_its_request_is_kept(rig: Rig) -> None:
    rig.take(Abort(FIRST), generate(FIRST), generate(FIRST + 1))
    assert not rig.scheduler.has_work


def test_an_abort_is_reported_once_for_all_sequences(rig: Rig) -> None:
    rig.take(*(generate(FIRST + i) for i in range(3)))
    rig.step()
    rig.heard()
    rig.take(Abort(FIRST))
    output, _ = rig.heard()
    assert list(output.rows()) == [(FIRST, 0, FinishReason.ABORT)]
    assert rig.slot[EngineField.ABORTED] == 3


def test_abort_of_an_ended_request_reaches_the_detokenizer(rig: Rig) -> None:
    rig.take(Abort(request_id(0, 6)))
    output, _ = rig.heard()
    assert list(output.rows()) == [(request_id(0, 6), 0, FinishReason.ABORT)]


def test_what_no_frontend_renews_is_aborted(rig: Rig) -> None:
    lost, kept = FIRST, request_id(0, 2)
    rig.take(generate(lost), generate(kept))
    for now in (0.0, LEASE_S / 2, LEASE_S, LEASE_S + 2):
        rig.now = now
        rig.take(RenewLeases(), ids=(kept,))
        rig.engine.abort_expired()
        assert list(rig.scheduler.requests) == [lost, kept]
    rig.now += LAPSE_S
    rig.engine.abort_expired()
    assert list(rig.scheduler.requests) == [kept]
    assert rig.slot[EngineField.LAPSED] == 1


def test_a_stop_ends_one_sequence_in_silence(rig: Rig) -> None:
    rig.take(generate(FIRST), generate(FIRST + 1))
    rig.step()
    rig.heard()
    rig.take(StopSequence(FIRST))
    rig.step()
    assert [id for id, _, _ in rig.heard()[0].rows()] == [FIRST + 1]


def test_what_happened_is_on_the_board(rig: Rig) -> None:
    rig.take(generate(), prompt=tuple(range(40)))
    rig.step()
    rig.step()
    rig.take(generate(request_id(0, 2)), prompt=tuple(range(40)))
    rig.step()
    rig.take(generate(request_id(0, 3)), prompt=tuple(range(9)))
    assert rig.slot[EngineField.WAITING_TOKENS] == 9
    names = ("STEPS", "COMPUTED_TOKENS", "GENERATED_TOKENS", "FINISHED", "RUNNING", "WAITING")
    assert [rig.slot[EngineField[name]] for name in names] == [3, 40 + 1 + 8, 3, 1, 1, 1]
    assert (rig.slot[EngineField.PREFIX_QUERIES], rig.slot[EngineField.PREFIX_HITS]) == (89, 32)
    assert rig.slot[EngineField.PAGES_TOTAL] == READY.num_pages


def test_a_cache_too_small_for_one_sequence_is_refused(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="holds 48 tokens, less than one sequence"):
        make_pool(WorkerReady(3, 16), rig.config)


@pytest.fixture
def compiler(rig: Rig) -> Slow:
    return rig.compiler


def receive_compiled(rig: Rig) -> None:
    """Let the engine look for what has been compiled until nothing is being compiled any more."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while rig.engine._grammars.is_busy:
        assert time.monotonic() < deadline
        rig.engine.receive(rig.inbox)


def with_grammar(id: int, grammar: bytes = b"grammar") -> GenerateRequest:
    return msgspec.structs.replace(generate(id), grammar=grammar)


def test_grammar_compilation_delays_no_other_request(rig: Rig, compiler: Slow) -> None:
    other = request_id(0, 2)
    rig.take(with_grammar(FIRST), with_grammar(FIRST + 1), generate(other))
    assert rig.step() == ["start", "finish"]
    assert [id for id, _, _ in rig.heard()[0].rows()] == [other]
    compiler.let.set()
    receive_compiled(rig)
    assert rig.step() == ["start", "masks", "finish"]
    assert [id for id, _, _ in rig.heard()[0].rows()] == [other, FIRST]
    rig.take(with_grammar(request_id(0, 3)))
    assert not rig.engine._grammars.is_busy, "what has been compiled is kept"


def test_a_grammar_ends_its_sequence_where_none_can_be_followed(rig: Rig) -> None:
    def load() -> GrammarCompiler:
        raise ValueError("no such tokenizer")

    rig.engine._grammars = MatcherQueue(load, [0])
    rig.take(with_grammar(FIRST))
    receive_compiled(rig)
    rig.step()
    check_stuck(rig, "after 0 tokens")


def test_a_stuck_grammar_fails_all_of_its_request(rig: Rig, compiler: Slow) -> None:
    compiler.let.set()
    rig.take(with_grammar(FIRST), with_grammar(FIRST + 1, b"wrong"))
    receive_compiled(rig)
    assert rig.step() == ["start", "masks", "finish"]
    output, tokens = rig.heard()
    assert (list(output.rows()), tokens) == ([(FIRST + 1, 0, FinishReason.ABORT)], [])
    assert output.failed.keys() == output.reasons.keys() == {FIRST}
    assert not rig.scheduler.has_work
    rig.take(generate(request_id(0, 2)))
    rig.step()
    assert [id for id, _, _ in rig.heard()[0].rows()] == [request_id(0, 2)]


def check_stuck(rig: Rig, where: str) -> None:
    """Check that the first request has failed for its grammar, with nothing told of its text."""
    output, tokens = rig.heard()
    assert (list(output.rows()), tokens) == ([(FIRST, 0, FinishReason.ABORT)], [])
    assert output.failed.keys() == {FIRST}
    assert where in output.reasons[FIRST]
    assert not rig.scheduler.has_work


def test_an_abort_reaches_what_waits_for_its_grammar(rig: Rig, compiler: Slow) -> None:
    rig.take(with_grammar(FIRST), with_grammar(request_id(0, 2)), Abort(FIRST))
    assert list(rig.heard()[0].rows()) == [(FIRST, 0, FinishReason.ABORT)]
    compiler.let.set()
    receive_compiled(rig)
    assert list(rig.scheduler.requests) == [request_id(0, 2)]


def test_what_waits_for_its_grammar_lapses_too(rig: Rig, compiler: Slow) -> None:
    rig.take(with_grammar(FIRST), generate(request_id(0, 2)))
    for now in (0.0, LEASE_S + 2, LEASE_S + 2 + LAPSE_S):
        rig.now = now
        rig.take(RenewLeases(), ids=(request_id(0, 2),))
        rig.engine.abort_expired()
    assert not rig.engine._grammars.requests
    rig.step()
    assert (FIRST, 0, FinishReason.ABORT) in rig.heard()[0].rows()
    compiler.let.set()
    receive_compiled(rig)
    assert list(rig.scheduler.requests) == [request_id(0, 2)]


@pytest.mark.parametrize("cause", ["followed", "allowed_token_ids"])
def test_text_outside_its_grammar_fails(rig: Rig, compiler: Slow, cause: str) -> None:
    compiler.let.set()
    rig.take(with_grammar(FIRST, b"wrong" if cause == "followed" else b"grammar"))
    receive_compiled(rig)
    rig.scheduler._by_id[FIRST].has_no_token = cause != "followed"
    rig.step()
    check_stuck(rig, cause)
