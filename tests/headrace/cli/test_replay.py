"""A replay detects that its process has no more to send."""

import pytest

from headrace.board.board import Board, Field, Seat, Slot, State
from headrace.cli.replay import BEAT_NS, NUM_BEATS, STUCK_S, Silence
from headrace.errors import HeadraceError

SECOND = 10**9
SAID_AT = 5.0


@pytest.fixture
def slot() -> Slot:
    found = Board.create([Seat("engine", 0)]).slot("engine")
    found.enter(State.READY)
    found[Field.HEARTBEAT_NS] = 1000 * SECOND
    return found


def looks(silence: Silence, slot: Slot, num_beats: int) -> list[bool]:
    """Look at it after each of some beats, and once more in between."""
    found = []
    for _ in range(num_beats):
        slot[Field.HEARTBEAT_NS] += BEAT_NS
        for after_ns in (1, BEAT_NS // 2):
            found.append(silence.is_final(SAID_AT, slot[Field.HEARTBEAT_NS] + after_ns))
    return found


def test_silence_of_a_busy_process_is_final(slot: Slot) -> None:
    silence = Silence(slot)
    assert not silence.is_final(SAID_AT, 1000 * SECOND)
    assert not any(looks(silence, slot, NUM_BEATS - 1))
    assert all(looks(silence, slot, 1))
    assert not silence.is_final(SAID_AT + 1, slot[Field.HEARTBEAT_NS]), "it has said something"
    assert not any(looks(silence, slot, NUM_BEATS - 1)[1:])


def test_silence_of_a_blocked_process_is_not_final(slot: Slot) -> None:
    silence = Silence(slot)
    silence.is_final(SAID_AT, 1000 * SECOND)
    looks(silence, slot, NUM_BEATS - 2)
    slot[Field.HEARTBEAT_NS] += 60 * SECOND  # where the machine stood still
    assert not silence.is_final(SAID_AT, slot[Field.HEARTBEAT_NS])


def test_silence_of_a_stuck_process_is_an_error(slot: Slot) -> None:
    silence, at = Silence(slot), 1000 * SECOND
    assert not silence.is_final(SAID_AT, at + int(STUCK_S) * SECOND)
    with pytest.raises(HeadraceError, match="engine 0 has been silent for 120 s"):
        silence.is_final(SAID_AT, at + int(STUCK_S) * SECOND + 1)
