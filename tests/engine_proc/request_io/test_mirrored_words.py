"""An engine's words, from one board to another."""

from headrace.board.board import Board, Seat, Timing
from headrace.board.fields import EngineField
from headrace.engine_proc.request_io.mirrored_words import read_words, write_words

AHEAD_NS = 5_000


def test_words_of_an_engine_come_to_its_seat_elsewhere() -> None:
    there, here = (Board.create([Seat("engine", 0)]).slot("engine") for _ in range(2))
    there[EngineField.STEPS], there[EngineField.STEPPED_NS] = 7, 1_000
    there.histogram(Timing.STEP).observe(3)
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
    write_words(here, memoryview(read_words(there, AHEAD_NS, lambda: True, True)))
    assert here[EngineField.STEPS] == 7
    assert here[EngineField.STEPPED_NS] == 1_000 + AHEAD_NS
    assert here[EngineField.STEP_DUE_NS] == 0
    assert here[EngineField.IS_BUSY] == 1
    assert [here[field] for field in own] == [2] * len(own)
    assert here.histogram_words == there.histogram_words


def test_histograms_stay_where_none_come() -> None:
    there, here = (Board.create([Seat("engine", 0)]).slot("engine") for _ in range(2))
    here.histogram(Timing.STEP).observe(3)
    before = here.histogram_words.tolist()
    write_words(here, memoryview(read_words(there, 0, lambda: False, False)))
    assert here.histogram_words.tolist() == before


def test_outputs_sent_while_words_are_read_count_as_work() -> None:
    there, here = (Board.create([Seat("engine", 0)]).slot("engine") for _ in range(2))

    def has_unread() -> bool:
        there[EngineField.FINISHED] = 1  # too late: the words have been read
        return True

    write_words(here, memoryview(read_words(there, 0, has_unread, False)))
    assert here[EngineField.IS_BUSY] == 1
    assert here[EngineField.FINISHED] == 0
