"""A file of records of one size, found by digest, each of which is right or gone after any death.

It has one writer and any number of readers. An entry is erased before its record is written to, and
written after it. The checksum tells a reader that it was overtaken, and that a disk lost a write.

    0     header, JSON
    4088  number of changes, u64
    4096  an entry per slot, of 64 bytes:
          0   seal, u64: a hash of slot, digest and checksum; 0 is void
          8   used, u64: when it was last read or written, in ns since 1970
          16  digest
          32  checksum of the record, u64
    then  the records, each at a page of the system's
"""

import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from headrace.errors import BAD_JSON
from headrace.storage.checksum import checksum

HEADER_BYTES = 4096
CHANGES_AT = HEADER_BYTES - 8
ENTRY = struct.Struct("<QQ16sQ24x")
WORD = struct.Struct("<Q")
USED_AT = 8
ALIGNMENT = 4096
VERSION = 1


class SlotFileHeader(msgspec.Struct, frozen=True):
    """What a file holds. A file with another header is another file."""

    kind: str
    fingerprint: str  # of all that the records depend on beside their digests
    model: str
    record_bytes: int
    num_slots: int
    version: int = VERSION

    @property
    def slot_bytes(self) -> int:
        """The distance between records."""
        return aligned(self.record_bytes)

    @property
    def records_at(self) -> int:
        """Where the first record is."""
        return aligned(HEADER_BYTES + self.num_slots * ENTRY.size)

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self.records_at + self.num_slots * self.slot_bytes


class SlotEntry(NamedTuple):
    """Where a record is, and how to know it."""

    slot: int
    checksum: int
    used_ns: int


def aligned(num_bytes: int) -> int:
    """Return the least multiple of the system's page that holds so many bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def slots_within(num_bytes: int, record_bytes: int) -> int:
    """Return how many slots a file of `num_bytes` has room for."""
    return max(0, (num_bytes - HEADER_BYTES - ALIGNMENT) // (aligned(record_bytes) + ENTRY.size))


def seal(slot: int, digest: bytes, number: int) -> int:
    """Return what makes an entry whole."""
    text = slot.to_bytes(8, "little") + digest + WORD.pack(number)
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") or 1


def read_header(fd: int) -> SlotFileHeader | None:
    """Return the header of a file; None where it is none, or is cut off."""
    text = os.pread(fd, CHANGES_AT, 0).rstrip(b"\0")
    try:
        header = msgspec.json.decode(text, type=SlotFileHeader)
    except BAD_JSON:
        return None
    is_whole = os.fstat(fd).st_size >= header.num_bytes and header.version == VERSION
    return header if is_whole and header.record_bytes > 0 else None


class SlotFileReader:
    """The records of a file that another process may be writing.

    Attributes:
        num_refused: records whose checksum was wrong.
    """

    def __init__(self, fd: int, header: SlotFileHeader) -> None:
        self.header = header
        self.num_refused = 0
        self._fd = fd
        self._changes = -1
        self._entries: OrderedDict[bytes, SlotEntry] = OrderedDict()  # the least recent first
        self.refresh()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._entries))

    @property
    def used_ns(self) -> int:
        """When any record was last used; 0 where there is none."""
        return max((entry.used_ns for entry in self._entries.values()), default=0)

    def refresh(self) -> None:
        """Read the entries, if any has changed."""
        changes = os.pread(self._fd, WORD.size, CHANGES_AT)
        if len(changes) == WORD.size and WORD.unpack(changes)[0] != self._changes:
            self._changes = WORD.unpack(changes)[0]
            self._entries = OrderedDict(self._read_entries())

    def _read_entries(self) -> list[tuple[bytes, SlotEntry]]:
        index = os.pread(self._fd, self.header.num_slots * ENTRY.size, HEADER_BYTES)
        index = index[: len(index) // ENTRY.size * ENTRY.size]
        found = [
            (digest, SlotEntry(slot, number, used))
            for slot, (kept, used, digest, number) in enumerate(ENTRY.iter_unpack(index))
            if kept and kept == seal(slot, digest, number)
        ]
        found.sort(key=lambda pair: pair[1].used_ns)
        return found

    def read(self, digest: bytes, into: memoryview) -> bool:
        """Read a record of this digest, if it is here and right."""
        entry = self._entries.get(digest)
        if entry is None:
            return False
        try:
            count = os.preadv(self._fd, [into], self._place(entry.slot))
        except OSError:
            count = 0
        if count == len(into) and checksum(into) == entry.checksum:
            return True
        self._refuse(digest, entry)
        return False

    def _refuse(self, digest: bytes, entry: SlotEntry) -> None:
        kept = os.pread(self._fd, WORD.size, self._entry_at(entry.slot))
        self.num_refused += kept == WORD.pack(seal(entry.slot, digest, entry.checksum))
        del self._entries[digest]

    def _place(self, slot: int) -> int:
        return self.header.records_at + slot * self.header.slot_bytes

    def _entry_at(self, slot: int) -> int:
        return HEADER_BYTES + slot * ENTRY.size


class SlotFile(SlotFileReader):
    """A file and its one writer. The least recently used record gives way.

    Args:
        fd: of a file that no other process writes; it is made anew unless it has this header.
        reserves: whether the disk has to have room for all of it.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(
        self,
        fd: int,
        header: SlotFileHeader,
        reserves: bool = True,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock = clock
        self._on_written: Callable[[bytes], None] = lambda _: None
        self._on_erased: Callable[[bytes], None] = lambda _: None
        if read_header(fd) != header:
            os.ftruncate(fd, 0)
            if reserves:
                os.posix_fallocate(fd, 0, header.num_bytes)
            else:
                os.ftruncate(fd, header.num_bytes)
            os.pwrite(fd, msgspec.json.encode(header), 0)
        super().__init__(fd, header)
        taken = {entry.slot for entry in self._entries.values()}
        self._free = [slot for slot in range(header.num_slots - 1, -1, -1) if slot not in taken]

    def tell(self, on_written: Callable[[bytes], None], on_erased: Callable[[bytes], None]) -> None:
        """Tell of the records that are here, and of each that comes or goes."""
        self._on_written, self._on_erased = on_written, on_erased
        for digest in self:
            on_written(digest)

    def read(self, digest: bytes, into: memoryview) -> bool:
        """Read a record, and note that it was used."""
        if not super().read(digest, into):
            return False
        entry = self._entries[digest]._replace(used_ns=self._clock())
        self._entries[digest] = entry
        self._entries.move_to_end(digest)
        os.pwrite(self._fd, WORD.pack(entry.used_ns), self._entry_at(entry.slot) + USED_AT)
        return True

    def write(self, digest: bytes, record: memoryview) -> None:
        """Write a record, unless it is here.

        Raises:
            OSError: the disk is full or broken. The record is not here.
        """
        assert len(record) == self.header.record_bytes
        if digest in self._entries or not self.header.num_slots:
            return
        if not self._free:
            self.erase(next(iter(self._entries)))
        slot = self._free[-1]
        entry = SlotEntry(slot, checksum(record), self._clock())
        write_all(self._fd, record, self._place(slot))
        packed = ENTRY.pack(
            seal(slot, digest, entry.checksum), entry.used_ns, digest, entry.checksum
        )
        write_all(self._fd, memoryview(packed), self._entry_at(slot))
        self._free.pop()
        self._entries[digest] = entry
        self._note_change()
        self._on_written(digest)

    def erase(self, digest: bytes) -> None:
        """Forget a record that is here."""
        slot = self._entries[digest].slot
        os.pwrite(self._fd, WORD.pack(0), self._entry_at(slot))
        del self._entries[digest]
        self._free.append(slot)
        self._note_change()
        self._on_erased(digest)

    def _refuse(self, digest: bytes, entry: SlotEntry) -> None:
        self.num_refused += 1
        self.erase(digest)

    def _note_change(self) -> None:
        self._changes += 1
        os.pwrite(self._fd, WORD.pack(self._changes), CHANGES_AT)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, however little a call takes."""
    while len(data):
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
