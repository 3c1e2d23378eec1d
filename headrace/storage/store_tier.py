"""A tier of the KV store: records in memory or on disk, this server's own and other servers'."""

import enum
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from headrace.storage.slot_file import SlotFile, SlotFileReader
from headrace.storage.store_directory import StoreDirectory

REST_S = 10.0  # after a failed write: the disk is full or broken

log = logging.getLogger(__name__)


class TierName(enum.IntEnum):
    """Which tier; its place in the fields of the board."""

    MEMORY = 0
    DISK = 1


class StoreTier:
    """Records by kind and digest.

    Args:
        own: the files that this server writes.
        directory: of files that other servers write.

    Attributes:
        num_found: records read.
        num_failed: writes that the disk did not take.
    """

    def __init__(
        self,
        name: TierName,
        own: Mapping[str, SlotFile],
        directory: StoreDirectory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.num_found = self.num_failed = 0
        self._own = own
        self._directory = directory
        self._others: dict[str, list[SlotFileReader]] = {}
        self._clock = clock
        self._rests_until = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Look at what other servers have written."""
        for kind, file in self._own.items() if self._directory is not None else ():
            assert self._directory is not None
            self._others[kind] = self._directory.others(file.header)
            for other in self._others[kind]:
                other.refresh()

    def _files(self, kind: str) -> Iterator[SlotFileReader]:
        yield self._own[kind]
        yield from self._others.get(kind, ())

    def has(self, kind: str, digest: bytes) -> bool:
        """Whether a record is here, as far as is known."""
        return any(digest in file for file in self._files(kind))

    def read(self, kind: str, digest: bytes, into: memoryview) -> bool:
        """Read a record, if one is here and right."""
        is_found = any(file.read(digest, into) for file in self._files(kind))
        self.num_found += is_found
        return is_found

    def write(self, kind: str, digest: bytes, record: memoryview) -> bool:
        """Keep a record, unless the disk does not take it; return whether it did."""
        if self._clock() < self._rests_until:
            return False
        try:
            self._own[kind].write(digest, record)
        except OSError as error:
            self.num_failed += 1
            self._rests_until = self._clock() + REST_S
            log.warning("--kv-store took no page: %s; no others for %g s", error, REST_S)
            return False
        return True

    @property
    def num_refused(self) -> int:
        """Records with a wrong checksum."""
        return sum(file.num_refused for kind in self._own for file in self._files(kind))

    @property
    def used_bytes(self) -> int:
        """The bytes of this server's records."""
        return sum(len(file) * file.header.record_bytes for file in self._own.values())

    @property
    def total_bytes(self) -> int:
        """The bytes of this server's files."""
        return sum(file.header.num_bytes for file in self._own.values())
