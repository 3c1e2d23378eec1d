"""The table of a cache: which page, or which state slot, holds what.

In production it lies in memory that outlives the engine, so that the next engine finds what workers
still have. An entry is void or whole after a death between any two writes: its seal is written last
and erased first.

    0    cache id, 16 bytes; zeros are none
    64   an entry each, of 32 bytes:
         0   seal, u64: a hash of the digest and the entry's number; 0 is void
         8   order, u64: the lowest is evicted first
         16  digest
"""

from hashlib import blake2b
from typing import NamedTuple

CACHE_ID_BYTES = 16
HEADER_BYTES = 64
ENTRY_BYTES = 32
ENTRY_WORDS = ENTRY_BYTES // 8
SEAL, ORDER, DIGEST = range(3)  # words of an entry; the digest has two
IN_USE = 1 << 63  # above all orders of what has no users
NO_CACHE = bytes(CACHE_ID_BYTES)


def table_bytes(num_entries: int) -> int:
    """Return the bytes of a table."""
    return HEADER_BYTES + num_entries * ENTRY_BYTES


class TableEntry(NamedTuple):
    """What a reader of a table sees of an entry. It changes whenever the entry is recorded anew."""

    seal: int
    order: int
    digest: bytes

    def is_whole(self, entry: int) -> bool:
        """Whether the entry of this number tells what is there."""
        return self.seal != 0 and self.seal == seal(entry, self.digest)


class CacheTable:
    """A table with one writer, and processes that read it meanwhile.

    Args:
        memory: `table_bytes` of it, zeros at first. By default the table dies with the process.
    """

    def __init__(self, num_entries: int, memory: memoryview | None = None) -> None:
        self.num_entries = num_entries
        memory = memoryview(bytearray(table_bytes(num_entries))) if memory is None else memory
        self._header = memory[:CACHE_ID_BYTES]
        self._words = memory[HEADER_BYTES : table_bytes(num_entries)].cast("Q")
        self._clock = 0  # the last order that was given

    @property
    def cache_id(self) -> bytes:
        """What names the memory that the entries tell of; `NO_CACHE` is none."""
        return bytes(self._header)

    def begin(self, cache_id: bytes) -> None:
        """Erase all entries, and tell of other memory from now on."""
        self._header[:] = NO_CACHE
        for entry, found in enumerate(self._words[SEAL::ENTRY_WORDS].tolist()):
            if found:
                self.erase(entry)
        self._header[:] = cache_id

    def record(self, entry: int, digest: bytes) -> None:
        """Register what is complete, and in use. The entry is void before."""
        start = entry * ENTRY_WORDS
        self._words[start + DIGEST] = int.from_bytes(digest[:8], "little")
        self._words[start + DIGEST + 1] = int.from_bytes(digest[8:], "little")
        self.take(entry)
        self._words[start + SEAL] = seal(entry, digest)

    def erase(self, entry: int) -> None:
        """Make an entry void, before what it tells of is written to."""
        self._words[entry * ENTRY_WORDS + SEAL] = 0

    def take(self, entry: int) -> None:
        """Note a first user. Of what is in use, the beginning of a prompt is evicted last."""
        self._clock += 1
        self._words[entry * ENTRY_WORDS + ORDER] = IN_USE - self._clock

    def leave(self, entry: int) -> None:
        """Note that the last user has left."""
        self._clock += 1
        self._words[entry * ENTRY_WORDS + ORDER] = self._clock

    def columns(self) -> tuple[list[int], list[int]]:
        """Return the seals and the orders of all entries."""
        return self._words[SEAL::ENTRY_WORDS].tolist(), self._words[ORDER::ENTRY_WORDS].tolist()

    def look(self, entry: int) -> TableEntry:
        """Return what an entry is now. One that was the same before and after was so between."""
        start = entry * ENTRY_WORDS
        words = self._words[start : start + ENTRY_WORDS]
        return TableEntry(words[SEAL], words[ORDER], words[DIGEST:].tobytes())

    def adopt(self) -> list[tuple[int, bytes]]:
        """Return the entries that are whole, with their digests: the first to be evicted first.

        None has users now. Torn entries are erased.
        """
        found = []
        for entry, kept in enumerate(self._words[SEAL::ENTRY_WORDS].tolist()):
            if not kept:
                continue
            start = entry * ENTRY_WORDS
            digest = self._words[start + DIGEST : start + ENTRY_WORDS].tobytes()
            if kept == seal(entry, digest):
                found.append((self._words[start + ORDER], entry, digest))
            else:
                self.erase(entry)
        found.sort()
        self._clock = max((order for order, *_ in found if order < IN_USE // 2), default=0)
        for _, entry, _ in found:
            self.leave(entry)
        return [(entry, digest) for _, entry, digest in found]


def seal(entry: int, digest: bytes) -> int:
    """Return what makes an entry whole. It tells one that is torn, whatever was written of it."""
    text = digest + entry.to_bytes(8, "little")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") or 1
