"""Files wait in the arena for their reader, and are freed when it dies."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField
from headrace.ipc.arena import PAGE_BYTES, Arena
from headrace.ipc.fetcher_messages import Fetch, Fetched, FromFetcher
from headrace.ipc.sockets import Inbox, address
from headrace.tokenizer_proc.fetcher.download import DownloadedFile
from headrace.tokenizer_proc.fetcher.result_sender import FetchResultSender

DEADLINE_S = 120
NUM_READERS = 2
FULL = DownloadedFile(b"x" * 3 * PAGE_BYTES, "image/png")  # most of the region


class Rig:
    """A fetcher's arena, and the processes that it answers."""

    def __init__(self, run_dir: str) -> None:
        self.board = Board.create([Seat("tokenizer", i) for i in range(NUM_READERS)])
        for reader in range(NUM_READERS):
            self.start(reader)
        self.inboxes: list[Inbox[FromFetcher]] = [
            Inbox(address(run_dir, "fetched", i), FromFetcher) for i in range(NUM_READERS)
        ]
        self.arena = Arena.create(1, 4 * PAGE_BYTES)
        self.results = FetchResultSender(run_dir, self.arena.region(0), self.board)
        self._num_sent = 0

    def start(self, reader: int) -> None:
        """Have a process come up, in place of another if there was one."""
        slot = self.board.slot("tokenizer", reader)
        if slot[CommonField.STATE] == State.READY:
            slot.die()
        for state in (State.STARTING, State.READY):
            slot.enter(state)

    def send(self, reader: int) -> "asyncio.Task[None]":
        """Answer a process with a file."""
        self._num_sent += 1
        fetch = Fetch(self._num_sent, reader, ["http://a.com/"])
        return asyncio.create_task(self.results.send(fetch, [FULL]))

    def heard(self, reader: int) -> Fetched:
        """Return what a process has been answered."""
        received = self.inboxes[reader].receive(1000 * DEADLINE_S)
        assert received is not None
        return received[0]

    def close(self) -> None:
        self.results.close()
        for inbox in self.inboxes:
            inbox.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(str(tmp_path))
    yield made
    made.close()


async def turns() -> None:
    """Let others have several turns."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_file_waits_until_the_one_before_it_has_been_read(rig: Rig) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await rig.send(0)
        (file,) = rig.heard(0).files
        later = rig.send(1)
        await turns()
        assert not later.done()
        assert bytes(rig.arena.read(file)) == FULL.data
        rig.arena.release(file)
        await later
    assert not rig.arena.holds(file)
    assert rig.arena.holds(rig.heard(1).files[0])


async def test_dead_reader_frees_its_room(rig: Rig) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await rig.send(0)
        later = rig.send(1)
        await turns()
        assert not later.done()
        rig.start(0)
        await later
    assert rig.arena.holds(rig.heard(1).files[0])
