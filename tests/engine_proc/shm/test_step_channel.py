"""Messages cross shared memory whole and in order, between threads and processes."""

import os
import subprocess
import sys
import threading
import time

import pytest

from headrace.engine_proc.shm.step_channel import NUM_SLOTS, StepChannel
from headrace.ipc.worker_messages import FromWorker, StepResult, WorkerReady

DEADLINE_S = 120.0
SLOT_BYTES = 4096

# Sends back what it receives, each message once, until an empty one.
ECHO = """
import sys
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.ipc.worker_messages import FromWorker

inward, outward = (StepChannel(int(fd), FromWorker) for fd in sys.argv[1:])
while (message := inward.receive(20.0)) is not None and message.token_ids:
    outward.send(message)
"""

Channel = StepChannel[FromWorker]


@pytest.fixture
def channel() -> Channel:
    return StepChannel.create(FromWorker, SLOT_BYTES)


def other_end(channel: Channel) -> Channel:
    """Map the channel a second time, as the process at its other end does."""
    return StepChannel(channel.fd, FromWorker)


def test_messages_arrive_in_order_and_equal(channel: Channel) -> None:
    reader = other_end(channel)
    sent = [WorkerReady(7, 16), *(StepResult(bytes([i]) * i) for i in range(NUM_SLOTS - 1))]
    for message in sent:
        channel.send(message)
    assert [reader.receive(DEADLINE_S) for _ in sent] == sent


def test_the_ring_goes_round_many_times(channel: Channel) -> None:
    reader = other_end(channel)
    for i in range(5 * NUM_SLOTS + 3):
        message = StepResult(i.to_bytes(4, "little") * (i % 7))
        channel.send(message)
        assert reader.receive(DEADLINE_S) == message


def test_nothing_to_read_is_none_after_the_timeout(channel: Channel) -> None:
    started = time.monotonic()
    assert channel.receive(0.05) is None
    assert 0.04 < time.monotonic() - started < DEADLINE_S / 4


def test_a_message_is_read_once(channel: Channel) -> None:
    reader = other_end(channel)
    channel.send(StepResult(b"once"))
    assert reader.receive(DEADLINE_S) is not None
    assert reader.receive(0.001) is None


def test_a_message_as_large_as_a_slot_arrives(channel: Channel) -> None:
    overhead = 16  # of msgpack around the bytes, at most
    message = StepResult(b"x" * (SLOT_BYTES - overhead))
    channel.send(message)
    assert other_end(channel).receive(DEADLINE_S) == message


def test_message_larger_than_a_slot_is_refused_harmlessly(channel: Channel) -> None:
    with pytest.raises(ValueError, match=f"slots have {SLOT_BYTES}"):
        channel.send(StepResult(b"x" * (SLOT_BYTES + 1)))
    channel.send(StepResult(b"small"))
    assert other_end(channel).receive(DEADLINE_S) == StepResult(b"small")


def test_a_reader_too_far_behind_is_noticed(channel: Channel) -> None:
    for _ in range(NUM_SLOTS):
        channel.send(StepResult(b"unread"))
    with pytest.raises(AssertionError, match="too far behind"):
        channel.send(StepResult(b"one too many"))


def test_counters_wrap_around(channel: Channel) -> None:
    last = (1 << 32) - 2
    for at in (0, 64):
        os.pwrite(channel.fd, last.to_bytes(4, "little"), at)
    writer, reader = other_end(channel), other_end(channel)
    for i in range(2 * NUM_SLOTS):
        writer.send(StepResult(bytes([i])))
        assert reader.receive(DEADLINE_S) == StepResult(bytes([i]))


def test_a_sleeping_reader_is_woken(channel: Channel) -> None:
    received: list[FromWorker | None] = []
    reader = other_end(channel)
    thread = threading.Thread(target=lambda: received.append(reader.receive(DEADLINE_S)))
    thread.start()
    assert thread.native_id is not None
    wait_until_asleep(thread.native_id)
    started = time.monotonic()
    channel.send(StepResult(b"wake"))
    thread.join()
    assert received == [StepResult(b"wake")]
    assert time.monotonic() - started < DEADLINE_S / 4


def wait_until_asleep(thread_id: int) -> None:
    """Wait until the kernel says that a thread of this process sleeps."""
    deadline = time.monotonic() + DEADLINE_S
    while state_of(thread_id) != "S":
        assert time.monotonic() < deadline


def state_of(thread_id: int) -> str:
    with open(f"/proc/self/task/{thread_id}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def test_two_processes_talk_through_inherited_descriptors(channel: Channel) -> None:
    back: Channel = StepChannel.create(FromWorker, SLOT_BYTES)
    fds = (channel.fd, back.fd)
    with subprocess.Popen([sys.executable, "-c", ECHO, *map(str, fds)], pass_fds=fds) as echo:
        for i in range(1, 200):
            message = StepResult(i.to_bytes(2, "little") * i)
            channel.send(message)
            assert back.receive(DEADLINE_S) == message
        channel.send(StepResult(b""))
        assert echo.wait(DEADLINE_S) == 0
    os.close(back.fd)


@pytest.mark.parametrize("slot_bytes", [-(1 << 20), 1 << 62])
def test_a_channel_of_a_size_that_cannot_be_leaves_no_descriptor(slot_bytes: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, ValueError, OverflowError)):
        StepChannel.create(FromWorker, slot_bytes)
    assert len(os.listdir("/proc/self/fd")) == before
