"""Each process writes its own slot and reads all slots."""

import os
import subprocess
import sys
import time

import pytest

from headrace.board.board import (
    HEARTBEAT_LIMIT_S,
    LOG_WORDS,
    MAX_IDS,
    SLOT_WORDS,
    Board,
    Seat,
    State,
)
from headrace.board.fields import (
    CommonField,
    EngineField,
    FrontendField,
)

SEATS = [Seat("frontend", 0), Seat("frontend", 1), Seat("engine", 0), Seat("worker", 0)]


@pytest.fixture
def board() -> Board:
    return Board.create(SEATS)


def test_a_new_board_is_all_zero(board: Board) -> None:
    assert [slot.seat for slot in board.slots] == SEATS
    assert all(slot[word] == 0 for slot in board.slots for word in range(SLOT_WORDS))


def test_slots_are_separate(board: Board) -> None:
    for number, slot in enumerate(board.slots, 1):
        for word in range(SLOT_WORDS):
            slot[word] = number
    for number, slot in enumerate(board.slots, 1):
        assert [slot[word] for word in range(SLOT_WORDS)] == [number] * SLOT_WORDS


def test_slots_are_found_by_role_and_index(board: Board) -> None:
    assert board.slot("frontend", 1) is board.slots[1]
    assert board.slot("engine") is board.slots[2]
    assert list(board.of("frontend")) == board.slots[:2]


def test_last_words_are_readable_and_cut_to_their_room(board: Board) -> None:
    writer, other = board.slots[1], Board(board.fd, SEATS)
    assert other.slots[1].exit_reason == ""
    writer.exit_reason = "model.gguf: not a GGUF file \N{FOX FACE}"
    assert other.slots[1].exit_reason == "model.gguf: not a GGUF file \N{FOX FACE}"
    writer.exit_reason = "x" * 600
    assert other.slots[1].exit_reason == "x" * 512
    assert not other.slots[0].exit_reason and not other.slots[2].exit_reason


def test_counting_adds(board: Board) -> None:
    slot = board.slot("engine")
    slot.add(EngineField.STEPS)
    slot.add(EngineField.STEPS, 2**40)
    assert slot[EngineField.STEPS] == 2**40 + 1


def test_entering_a_state_records_pid_and_time(board: Board) -> None:
    slot = board.slot("engine")
    slot.enter(State.STARTING)
    assert (slot[CommonField.STATE], slot[CommonField.PID]) == (State.STARTING, os.getpid())
    assert 0 <= time.monotonic_ns() - slot[CommonField.HEARTBEAT_NS] < 60e9


def test_what_a_child_writes_is_read_here(board: Board) -> None:
    code = (
        "from headrace.board.board import *;from headrace.board.fields import *;"
        f"Board({board.fd}, [Seat('frontend', 0), Seat('frontend', 1)])"
        ".slot('frontend', 1)[FrontendField.REQUESTS] = 77"
    )
    subprocess.run([sys.executable, "-c", code], pass_fds=(board.fd,), check=True)
    assert board.slot("frontend", 1)[FrontendField.REQUESTS] == 77
    assert board.slot("frontend", 0)[FrontendField.REQUESTS] == 0


def test_all_are_unhealthy_until_they_are_ready(board: Board) -> None:
    assert board.unhealthy() == SEATS
    for slot in board.slots:
        slot.enter(State.READY)
    assert board.unhealthy() == []
    board.slot("engine")[CommonField.STATE] = State.DEAD
    assert board.unhealthy() == [Seat("engine", 0)]


def test_a_process_that_is_silent_too_long_is_unhealthy(board: Board) -> None:
    slot = board.slot("engine")
    slot.enter(State.READY)
    limit_ns = slot[CommonField.HEARTBEAT_NS] + int(HEARTBEAT_LIMIT_S * 1e9)
    assert slot.healthy(limit_ns - 10**6)
    assert not slot.healthy(limit_ns + 10**6)
    silence = f"engine 0 has been silent for {HEARTBEAT_LIMIT_S:.0f} s"
    assert slot.unhealthy_reason(limit_ns + 10**6) == silence


def test_a_step_that_is_overdue_is_an_illness(board: Board) -> None:
    engine, frontend = board.slot("engine"), board.slot("frontend")
    for slot in (engine, frontend):
        slot.enter(State.READY)
        slot[EngineField.STEP_DUE_NS] = slot[CommonField.HEARTBEAT_NS] + 10**9
    now_ns = frontend[CommonField.HEARTBEAT_NS] + 2 * 10**9
    assert engine.unhealthy_reason(engine[EngineField.STEP_DUE_NS]) is None
    assert (
        engine.unhealthy_reason(now_ns) == "engine 0 waits for a step that has taken far too long"
    )
    assert frontend.healthy(now_ns), "that word is another's"


def test_open_request_ids_are_readable_oldest_first(board: Board) -> None:
    writer, other = board.slots[1], Board(board.fd, SEATS).slots[1]
    for ids in ([5, 2**63], [], range(1, MAX_IDS + 10)):
        writer.open_ids = ids
        assert other.open_ids == list(ids)[:MAX_IDS]
    assert not board.slots[0].open_ids and not any(writer.http_words)
    writer.enter(State.STARTING)
    assert other.open_ids == []


def test_a_seat_reads_as_role_and_number() -> None:
    assert str(Seat("frontend", 3)) == "frontend 3"


def test_a_slot_remembers_the_end_of_its_log(board: Board) -> None:
    slot = board.slots[0]
    assert slot.log_tail == ""
    for number in range(2000):
        slot.keep_line(b"line %d\n" % number)
    lines = slot.log_tail.splitlines()
    assert len(slot.log_tail) == (LOG_WORDS - 1) * 8
    assert lines[1:] == [f"line {number}" for number in range(2001 - len(lines), 2000)]
    slot.keep_line(b"x" * 20000)
    assert slot.log_tail == "x" * (LOG_WORDS - 1) * 8
    slot.enter(State.STARTING)
    assert slot.log_tail == ""
