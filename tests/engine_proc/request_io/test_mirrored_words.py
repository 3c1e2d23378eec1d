"""An engine's words, from one board to another."""

from headrace.board.board import Board, Seat, Slot, Timing
from headrace.board.fields import EngineField
from headrace.engine_proc.request_io.mirrored_words import MirroredWords, read_words

AHEAD_NS = 5_000


def engine() -> Slot:
    return Board.create([Seat("engine", 0)]).slot("engine")


def words(slot: Slot, with_histograms: bool = True) -> bytes:
    return read_words(slot, AHEAD_NS, with_histograms)


def test_words_of_an_engine_come_to_its_seat_elsewhere() -> None:
    there, here = engine(), engine()
    there[EngineField.RUNNING], there[EngineField.STEPPED_NS] = 7, 1_000
    there[EngineField.IS_BUSY] = 1
    own = (
        EngineField.MODEL,
        EngineField.SEATING,
        EngineField.TAKEN_TOKENS,
        EngineField.LOADS,
        EngineField.FAILED_LOADS,
        EngineField.RETRY_NS,
    )
    for field in own:
        there[field], here[field] = 1, 2
    assert MirroredWords(here).take(words(there))
    assert here[EngineField.RUNNING] == 7
    assert here[EngineField.STEPPED_NS] == 1_000 + AHEAD_NS
    assert here[EngineField.STEP_DUE_NS] == 0
    assert here[EngineField.IS_BUSY] == 1
    assert [here[field] for field in own] == [2] * len(own)


def test_counters_grow_by_what_a_session_adds() -> None:
    """Whatever the engine has counted for others, and however often it begins anew."""
    here = engine()
    for num_before in (100, 0, 50):
        there, session = engine(), MirroredWords(here)
        there[EngineField.STEPS] = num_before
        there.histogram(Timing.STEP).observe(3, num_before)
        assert session.take(words(there))
        there[EngineField.STEPS] += 5
        assert session.take(words(there, with_histograms=False))
        there[EngineField.STEPS] += 2
        there.histogram(Timing.STEP).observe(3, 4)
        assert session.take(words(there))
    assert here[EngineField.STEPS] == 3 * 7
    expected = engine()
    expected.histogram(Timing.STEP).observe(3, 3 * 4)
    assert here.histogram_words == expected.histogram_words


def test_words_that_do_not_fit_change_nothing() -> None:
    there, here = engine(), engine()
    session = MirroredWords(here)
    there[EngineField.STEPS] = 9
    assert session.take(words(there))
    before = here.work
    there[EngineField.STEPS], there[EngineField.RUNNING] = 8, 1  # a counter that falls
    for wrong in (words(there), words(there)[:-8], words(there) + bytes(8), b"", b"x"):
        assert not session.take(wrong)
    assert here.work == before
