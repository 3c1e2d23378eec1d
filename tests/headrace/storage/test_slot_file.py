"""Files of records: after kills, full disks and damage each record is right or gone."""

import contextlib
import errno
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from headrace.storage import slot_file
from headrace.storage.slot_file import (
    ENTRY,
    HEADER_BYTES,
    SlotFile,
    SlotFileHeader,
    SlotFileReader,
    read_header,
    slots_within,
)

RECORD_BYTES, NUM_SLOTS = 200, 4
HEADER = SlotFileHeader("pages", "f" * 32, "model", RECORD_BYTES, NUM_SLOTS)
DIGESTS = [bytes([i]) * 16 for i in range(1, 9)]
LONG = 1 << 30


def record_of(digest: bytes) -> memoryview:
    """Return the record of a digest: the same in all files."""
    text = b"".join(blake2b(digest + bytes([i])).digest() for i in range(4))
    return memoryview(bytearray(text[:RECORD_BYTES]))


def is_right(file: SlotFileReader, digest: bytes) -> bool:
    """Read a record, and return whether it was there; one that was has to be right."""
    into = memoryview(bytearray(RECORD_BYTES))
    is_there = file.read(digest, into)
    assert not is_there or into == record_of(digest), "another record came back"
    return is_there


class Killed(BaseException):
    """The writer was killed within a write."""


class Disk:
    """`os`, with a writer that is killed at some write, or a disk that is full by then."""

    def __init__(self) -> None:
        self.num_writes = LONG
        self.fault: BaseException = Killed()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        self.num_writes -= 1
        if self.num_writes >= 0:
            return os.pwrite(fd, data, offset)
        if isinstance(self.fault, Killed):
            os.pwrite(fd, bytes(data)[: len(bytes(data)) // 2], offset)
        raise self.fault


class Faults(RuleBasedStateMachine):
    """A writer that is killed and started again, beside a reader, on a file that gets damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "pages-0.kv"
        self.disk = Disk()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(slot_file, "os", self.disk)
        self.now = 0
        self.is_damaged = False
        self.known: list[bytes] = []  # the least recently used first
        self.fds: list[int] = []
        self.start()

    def teardown(self) -> None:
        self.patch.undo()
        for fd in self.fds:
            os.close(fd)
        self.folder.cleanup()

    def open(self, flags: int) -> int:
        self.fds.append(os.open(self.path, flags))
        return self.fds[-1]

    def tick(self) -> int:
        self.now += 1
        return self.now

    def start(self) -> None:
        self.disk.num_writes = LONG
        self.file = SlotFile(self.open(os.O_RDWR | os.O_CREAT), HEADER, clock=self.tick)
        if not self.is_damaged:
            assert set(self.file) == set(self.known)
        else:  # what is wrong is found, and erased, when it is read
            for digest in self.file:
                is_right(self.file, digest)
        self.known = list(self.file)
        self.is_damaged = False
        self.reader = SlotFileReader(self.open(os.O_RDONLY), HEADER)

    @rule(digest=st.sampled_from(DIGESTS))
    def write(self, digest: bytes) -> None:
        self.file.write(digest, record_of(digest))
        if digest not in self.known:
            self.known = [*self.known, digest][-NUM_SLOTS:]
        if not self.is_damaged:
            assert list(self.file) == self.known
        self.known = list(self.file)

    @rule(digest=st.sampled_from(DIGESTS), num_writes=st.integers(0, 4), is_full=st.booleans())
    def write_in_vain(self, digest: bytes, num_writes: int, is_full: bool) -> None:
        self.disk.num_writes = num_writes
        self.disk.fault = OSError(errno.ENOSPC, "full") if is_full else Killed()
        before = set(self.file)
        with contextlib.suppress(OSError, Killed):
            self.file.write(digest, record_of(digest))
        self.disk.num_writes = LONG
        was_damaged, self.is_damaged = self.is_damaged, self.is_damaged or not is_full
        if is_full:
            assert set(self.file) - before <= {digest}
            self.known = list(self.file)
        else:
            self.start()
            assert was_damaged or len(before - set(self.file)) <= 1, "more is lost than one record"

    @rule(digest=st.sampled_from(DIGESTS))
    def read(self, digest: bytes) -> None:
        is_there = is_right(self.file, digest)
        assert self.is_damaged or is_there == (digest in self.known)
        self.known = list(self.file)

    @rule(digest=st.sampled_from(DIGESTS), is_fresh=st.booleans())
    def read_as_another(self, digest: bytes, is_fresh: bool) -> None:
        if is_fresh:
            self.reader.refresh()
        is_there = is_right(self.reader, digest)
        assert self.is_damaged or not is_fresh or is_there == (digest in self.known)

    @rule()
    def start_again(self) -> None:
        self.start()

    @rule(place=st.integers(HEADER_BYTES, HEADER.num_bytes - 1), bit=st.integers(0, 7))
    def flip(self, place: int, bit: int) -> None:
        fd = self.fds[-2]
        byte = os.pread(fd, 1, place) or b"\0"
        os.pwrite(fd, bytes([byte[0] ^ 1 << bit]), place)
        self.is_damaged = True

    @rule(size=st.integers(0, HEADER.num_bytes))
    def cut(self, size: int) -> None:
        os.truncate(self.path, size)
        self.is_damaged = True


TestFaults = Faults.TestCase


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "pages-0.kv", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_a_record_outlives_its_writer(fd: int) -> None:
    SlotFile(fd, HEADER).write(DIGESTS[0], record_of(DIGESTS[0]))
    assert is_right(SlotFile(fd, HEADER), DIGESTS[0])
    assert read_header(fd) == HEADER


def test_a_file_for_other_records_is_made_anew(fd: int) -> None:
    SlotFile(fd, HEADER).write(DIGESTS[0], record_of(DIGESTS[0]))
    other = SlotFileHeader("pages", "e" * 32, "model", RECORD_BYTES, NUM_SLOTS)
    assert len(SlotFile(fd, other)) == 0
    assert read_header(fd) == other


def test_a_flipped_bit_is_refused_and_counted(fd: int) -> None:
    file = SlotFile(fd, HEADER)
    file.write(DIGESTS[0], record_of(DIGESTS[0]))
    os.pwrite(fd, b"?", HEADER.records_at + 7)
    assert not is_right(file, DIGESTS[0])
    assert (file.num_refused, len(file)) == (1, 0)
    assert len(SlotFile(fd, HEADER)) == 0


def test_a_reader_that_is_overtaken_refuses_nothing(fd: int) -> None:
    file, reader = SlotFile(fd, HEADER), SlotFileReader(fd, HEADER)
    file.write(DIGESTS[0], record_of(DIGESTS[0]))
    reader.refresh()
    for digest in DIGESTS[1 : NUM_SLOTS + 1]:
        file.write(digest, record_of(digest))
    assert not is_right(reader, DIGESTS[0])
    assert reader.num_refused == 0


def test_the_least_recently_used_record_gives_way(fd: int) -> None:
    file = SlotFile(fd, HEADER)
    for digest in DIGESTS[:NUM_SLOTS]:
        file.write(digest, record_of(digest))
    assert is_right(file, DIGESTS[0])
    file.write(DIGESTS[5], record_of(DIGESTS[5]))
    assert DIGESTS[0] in file and DIGESTS[1] not in file


@pytest.mark.parametrize("num_slots", [1, 2, 63, 64, 1000])
def test_a_file_fits_into_its_bytes(num_slots: int) -> None:
    header = SlotFileHeader("pages", "", "", 100_000, num_slots)
    assert slots_within(header.num_bytes - 1, 100_000) < num_slots
    most = slots_within(header.num_bytes + ENTRY.size * 64, 100_000)
    assert SlotFileHeader("pages", "", "", 100_000, most).num_bytes <= header.num_bytes + 4096


def test_what_comes_and_goes_is_told() -> None:
    fd = os.memfd_create("records")
    header = SlotFileHeader("pages", "", "", record_bytes=8, num_slots=2)
    first, second, third = (bytes([number]) * 16 for number in (1, 2, 3))
    SlotFile(fd, header, reserves=False).write(first, memoryview(bytearray(8)))
    file, here = SlotFile(fd, header, reserves=False), set[bytes]()
    file.tell(here.add, here.remove)
    assert here == {first}, "what the writer before has left"
    for digest in (second, third):
        file.write(digest, memoryview(bytearray(8)))
    assert here == {second, third}, "the least recently used record has given way"
    os.close(fd)
