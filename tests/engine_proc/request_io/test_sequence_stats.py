"""Every sequence that runs to its end is counted once, with the time that each part took."""

from array import array

import pytest

from headrace.board.board import Board, Seat, Slot, Timing
from headrace.board.fields import EngineField
from headrace.engine_proc.request_io.sequence_stats import SequenceStats, TokenRate
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.sequence.sequence_output import SequenceOutput
from headrace.ipc.messages import FinishReason, GenerateRequest, Sampling

MS = 10**6


@pytest.fixture
def slot() -> Slot:
    return Board.create([Seat("engine", 0)]).slot("engine")


def sequence(num_prompt: int = 10, num_cached: int = 0) -> Sequence:
    """A sequence that came at 1 ms and began to run at 3 ms."""
    request = GenerateRequest(1, 0, 50, Sampling(), [], b"")
    made = Sequence.of(request, array("I", range(num_prompt)).tobytes(), 1 * MS)
    made.scheduled_ns, made.num_cached = 3 * MS, num_cached
    return made


def news(s: Sequence, num_tokens: int = 1, finished: FinishReason | None = None) -> SequenceOutput:
    s.tokens.extend(range(num_tokens))
    return SequenceOutput(s, list(range(num_tokens)), finished)


def sums(slot: Slot, *spans: Timing) -> list[float]:
    return [slot.histogram(span).sum for span in spans]


def num(slot: Slot, span: Timing) -> int:
    return sum(slot.histogram(span).counts)


PARTS = (Timing.WAITED, Timing.PREFILLED, Timing.DECODED, Timing.RAN, Timing.PER_TOKEN)


def test_a_sequence_is_waited_for_prefilled_and_decoded(slot: Slot) -> None:
    sequence_stats, s = SequenceStats(slot), sequence(num_cached=4)
    s.num_preemptions = 2
    sequence_stats.take([news(s)], 10 * MS)
    sequence_stats.take([news(s, 2)], 16 * MS)
    sequence_stats.take([news(s, 1, FinishReason.LENGTH)], 19 * MS)
    assert num(slot, Timing.WAITED) == 0, "it is counted when there is time"
    sequence_stats.settle()
    assert sums(slot, *PARTS) == pytest.approx([0.002, 0.007, 0.009, 0.016, 0.003])
    counts = (Timing.PROMPT, Timing.COMPUTED, Timing.GENERATED, Timing.MAX_TOKENS, Timing.PREEMPTED)
    assert sums(slot, *counts) == [10, 6, 4, 50, 2]
    assert (num(slot, Timing.BETWEEN), *sums(slot, Timing.BETWEEN)) == (2, pytest.approx(0.009))
    assert (slot[EngineField.PREFILLED_TOKENS], slot[EngineField.CACHED_TOKENS]) == (6, 4)
    assert [slot[EngineField.ENDED + why] for why in range(2)] == [0, 1]


def test_sequences_of_a_step_have_their_own_last_tokens(slot: Slot) -> None:
    sequence_stats, one, other = SequenceStats(slot), sequence(), sequence()
    sequence_stats.take([news(one), news(other)], 10 * MS)
    sequence_stats.take([news(one)], 20 * MS)
    sequence_stats.take([news(one), news(other)], 30 * MS)
    sequence_stats.settle()
    sequence_stats.settle()
    assert num(slot, Timing.BETWEEN) == 3
    assert sums(slot, Timing.BETWEEN) == pytest.approx([0.010 + 0.010 + 0.020])


def test_a_text_of_one_token_has_no_time_per_token(slot: Slot) -> None:
    sequence_stats, s = SequenceStats(slot), sequence()
    sequence_stats.take([news(s, 1, FinishReason.STOP)], 10 * MS)
    sequence_stats.settle()
    assert (num(slot, Timing.DECODED), num(slot, Timing.PER_TOKEN)) == (1, 0)


def test_aborted_sequence_counts_only_its_prompt(slot: Slot) -> None:
    sequence_stats, s = SequenceStats(slot), sequence()
    sequence_stats.take([news(s)], 10 * MS)
    sequence_stats.take([SequenceOutput(s, [], FinishReason.ABORT)], 20 * MS)
    sequence_stats.settle()
    assert not any(num(slot, span) for span in Timing)
    assert slot[EngineField.PREFILLED_TOKENS] == 10
    assert [slot[EngineField.ENDED + why] for why in range(2)] == [0, 0]


def test_a_stop_string_ends_a_sequence_at_its_last_token(slot: Slot) -> None:
    sequence_stats, s = SequenceStats(slot), sequence()
    sequence_stats.take([news(s)], 10 * MS)
    sequence_stats.take([news(s)], 15 * MS)
    sequence_stats.stop(s)
    assert sums(slot, *PARTS) == pytest.approx([0.002, 0.007, 0.005, 0.012, 0.005])
    assert slot[EngineField.ENDED + FinishReason.STOP] == 1


def test_an_embedding_is_its_sequences_first_and_last_news(slot: Slot) -> None:
    sequence_stats, s = SequenceStats(slot), sequence()
    sequence_stats.take([SequenceOutput(s, [], FinishReason.STOP, None, b"\0\0\0\0")], 10 * MS)
    sequence_stats.settle()
    assert sums(slot, *PARTS) == pytest.approx([0.002, 0.007, 0, 0.007, 0])
    assert sums(slot, Timing.GENERATED) == [0]


def test_token_rate_covers_the_last_second_or_longer(slot: Slot) -> None:
    rate = TokenRate(slot)
    rate.observe(5000 * MS)
    told = []
    for at_ms, num in [(5500, 10), (6000, 30), (6900, 50), (8000, 70)]:
        slot[EngineField.GENERATED_TOKENS] = num
        rate.observe(at_ms * MS)
        told.append(slot[EngineField.TOKENS_PER_SECOND])
    assert told == [0, 30, 30, 20]


def test_accounts_tell_how_fast_tokens_come(slot: Slot) -> None:
    sequence_stats, s = SequenceStats(slot), sequence()
    for second in (1, 2):
        slot.add(EngineField.GENERATED_TOKENS, 40)
        sequence_stats.take([news(s)], second * 1000 * MS)
    sequence_stats.settle()
    assert slot[EngineField.TOKENS_PER_SECOND] == 0, "all came before it was looked at"
    slot.add(EngineField.GENERATED_TOKENS, 40)
    sequence_stats.take([news(s)], 4000 * MS)
    sequence_stats.settle()
    assert slot[EngineField.TOKENS_PER_SECOND] == 20
