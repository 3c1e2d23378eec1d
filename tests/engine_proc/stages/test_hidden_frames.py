"""Hidden states pass between machines whole and in order, or not at all."""

import threading
import time

import msgspec
import numpy as np
import pytest
import zmq
from hidden_ends import both_ends
from servers import wait_until

from headrace.engine_proc.shm.hidden_link import FAILED, HiddenLink
from headrace.engine_proc.stages.hidden_frames import FrameSink, FrameSource
from headrace.engine_proc.stages.pump import Pump
from headrace.ipc.curve_key import CurveKey
from headrace.ipc.curve_links import CurveLink, CurveListener
from headrace.ipc.remote_messages import HiddenFrame
from headrace.ipc.sockets import Frame, wait_for_any
from headrace.runtime.message_checks import WrongMessage
from support.ports import reserved_port

SIZES = NUM_FRAMES, MAX_ROWS, ROW_SIZE = 4, 50, 1000
RUN = 7
DEADLINE_S = 60.0


def sink_and_reader() -> tuple[FrameSink, HiddenLink]:
    """Return what takes frames of another machine, and the worker's end behind it."""
    writer, reader = both_ends(*SIZES)
    return FrameSink(writer, MAX_ROWS, ROW_SIZE), reader


def test_bits_of_frames_cross_an_encrypted_link_in_order() -> None:
    public, secret = zmq.curve_keypair()
    key = CurveKey(secret, public)
    with reserved_port() as port:
        listener = CurveListener(f"tcp://127.0.0.1:{port}", key, "")
    link = CurveLink(listener.where, key, keeps_alive=True)
    writer, source_end = both_ends(*SIZES)
    sink, reader = sink_and_reader()
    pump = Pump(FrameSource(source_end, RUN).take)
    rng = np.random.default_rng(0)
    sent = [rng.standard_normal((1 + 7 * i % MAX_ROWS, ROW_SIZE), np.float32) for i in range(30)]
    sent[3][0, 0], sent[4][0, 0] = np.nan, -0.0
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(HiddenFrame).decode

    def relay() -> None:
        """Pass frames on until the last has come."""
        num_left, until = len(sent), time.monotonic() + DEADLINE_S
        while num_left and time.monotonic() < until:
            wait_for_any([*pump.polled, *listener.polled, *link.polled], 50)
            listener.admit()
            link.lost_connections()
            for frame, rows in pump.take():
                assert link.send([encode(frame), *rows])
            while (received := listener.receive()) is not None:
                _, (head, *data) = received
                sink.write(decode(head), data)
                num_left -= 1

    def is_connected() -> bool:
        wait_for_any([*listener.polled, *link.polled], 50)
        listener.admit()
        assert not link.lost_connections()
        return link.is_connected

    wait_until(is_connected, "a connection")
    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    for first in range(0, len(sent), 2):
        pair = sent[first : first + 2]
        for rows in pair:
            writer.room(len(rows))[:] = rows
            writer.send(len(rows))
        for rows in pair:
            assert reader.wait(DEADLINE_S)
            read = reader.rows()
            assert read is not None
            assert read.tobytes() == rows.tobytes()
            reader.release()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    pump.close()
    link.close()
    listener.close()


def test_a_frame_of_a_failed_step_has_no_rows() -> None:
    writer, source_end = both_ends(*SIZES)
    sink, reader = sink_and_reader()
    source = FrameSource(source_end, RUN)
    assert source.take(0) is None
    writer.send()
    taken = source.take(0)
    assert taken == (HiddenFrame(RUN, 0, FAILED), [])
    sink.write(*taken)
    assert reader.wait(0)
    assert reader.rows() is None


@pytest.mark.parametrize(
    ("frame", "data", "why"),
    [
        (HiddenFrame(RUN, 1, 1), [bytes(4 * ROW_SIZE)], "frame 1, where 0 is the next"),
        (HiddenFrame(RUN, 0, 0), [b""], "0 rows"),
        (HiddenFrame(RUN, 0, MAX_ROWS + 1), [b""], "at most 50 fit"),
        (HiddenFrame(RUN, 0, -2), [], "-2 rows"),
        (HiddenFrame(RUN, 0, 1), [], r"\[\] bytes of 1 rows"),
        (HiddenFrame(RUN, 0, 1), [bytes(4 * ROW_SIZE - 1)], "3999"),
        (HiddenFrame(RUN, 0, 1), [bytes(4 * ROW_SIZE), b""], "0"),
        (HiddenFrame(RUN, 0, FAILED), [b""], "failed"),
    ],
)
def test_frames_that_are_not_whole_are_refused(
    frame: HiddenFrame, data: list[Frame], why: str
) -> None:
    sink, reader = sink_and_reader()
    with pytest.raises(WrongMessage, match=why):
        sink.write(frame, data)
    assert not reader.wait(0)


def test_more_frames_than_steps_in_flight_are_refused() -> None:
    sink, _ = sink_and_reader()
    for number in range(NUM_FRAMES):
        sink.write(HiddenFrame(RUN, number, FAILED), [])
    with pytest.raises(WrongMessage, match="more frames"):
        sink.write(HiddenFrame(RUN, NUM_FRAMES, FAILED), [])


def test_a_pump_wakes_for_items_and_ends() -> None:
    items = iter(range(3))
    pump = Pump(lambda _: next(items, None))
    seen: list[int] = []

    def all_are_seen() -> bool:
        wait_for_any(pump.polled, 50)
        seen.extend(pump.take())
        return len(seen) == 3

    wait_until(all_are_seen, "all items")
    assert seen == [0, 1, 2]
    pump.close()
