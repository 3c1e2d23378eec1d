"""Frames of hidden states pass from a stage to the next, in order and as they are."""

import ctypes
import threading

import numpy as np
import pytest
from hidden_ends import both_ends

from headrace.engine_proc.shm.stage_links import StageLinks

SIZES = NUM_FRAMES, MAX_ROWS, ROW_SIZE = 3, 5, 7
DEADLINE_S = 60.0


def test_frames_come_in_order_and_unchanged() -> None:
    writer, reader = both_ends(*SIZES)
    rng = np.random.default_rng(0)
    sent = [rng.standard_normal((1 + i % MAX_ROWS, ROW_SIZE), np.float32) for i in range(20)]
    for first in range(0, len(sent), 2):
        pair = sent[first : first + 2]
        for rows in pair:
            writer.room(len(rows))[:] = rows
            writer.send(len(rows))
        for rows in pair:
            assert reader.wait(0)
            np.testing.assert_array_equal(reader.rows(), rows)
            reader.release()
    assert not reader.wait(0)


def test_a_frame_may_say_that_its_step_has_failed() -> None:
    writer, reader = both_ends(*SIZES)
    writer.send()
    assert reader.wait(0)
    assert reader.rows() is None


def test_no_frame_is_written_over_one_that_is_not_read() -> None:
    writer, _ = both_ends(*SIZES)
    for _ in range(NUM_FRAMES):
        writer.send()
    with pytest.raises(AssertionError, match="too far behind"):
        writer.send()
    with pytest.raises(AssertionError, match="too far behind"):
        writer.room(1)


def test_frames_have_no_more_rows_than_they_have_room_for() -> None:
    writer, _ = both_ends(*SIZES)
    with pytest.raises(AssertionError, match="6 rows, where frames have 5"):
        writer.room(MAX_ROWS + 1)


def test_frames_pass_between_threads_while_counters_wrap() -> None:
    writer, reader = both_ends(*SIZES)
    for end in (writer, reader):
        end._written = end._read = end._wrap - 50
    writer._core.headrace_publish(writer._read_at, ctypes.c_uint32(writer._read))
    writer._core.headrace_publish(writer._written_at, ctypes.c_uint32(writer._written))
    unread = threading.Semaphore(NUM_FRAMES)

    def write() -> None:
        for number in range(200):
            unread.acquire()
            writer.room(MAX_ROWS)[:] = number
            writer.send(MAX_ROWS)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    for number in range(200):
        assert reader.wait(DEADLINE_S)
        rows = reader.rows()
        assert rows is not None
        assert (rows == number).all()
        reader.release()
        unread.release()
    thread.join()


def test_a_stage_passes_on_that_a_step_has_failed() -> None:
    writer, before = both_ends(*SIZES)
    after, reader = both_ends(*SIZES)
    links = StageLinks(before, after)
    writer.send()
    writer.room(1)[:] = 3
    writer.send(1)
    assert not links.begin()
    links.end(works=False)
    assert links.begin()
    assert links.hidden is not None
    links.room(1)[:] = links.hidden + 1
    links.end(works=True)
    seen = []
    for _ in range(2):
        assert reader.wait(0)
        rows = reader.rows()
        seen.append(None if rows is None else rows.tolist())
        reader.release()
    assert seen == [None, [[4.0] * ROW_SIZE]]
