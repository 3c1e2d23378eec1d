"""Embeddings of images on disk: of each image a tower computes the rows once, over restarts.

A record has `RECORD_ROWS` rows of one image, of which the last record may have fewer.
"""

import logging
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.shm.embedding_area import ROW_NUMBER_BYTES
from headrace.ipc.page_digests import DIGEST_BYTES
from headrace.storage.slot_file import SlotFileHeader, slots_within
from headrace.storage.store_directory import EMBEDDINGS, StoreDirectory
from headrace.storage.store_tier import StoreTier, TierName

RECORD_ROWS = 64  # as many as SmolVLM has of a tile; other images leave a part of a record unused

Floats = npt.NDArray[np.float32]

log = logging.getLogger(__name__)


class EmbeddingStore:
    """The embeddings of one model's images in a `--kv-store` directory.

    Args:
        row_size: numbers of a row.
    """

    def __init__(self, tier: StoreTier, row_size: int) -> None:
        self._tier = tier
        self._record: Floats = np.zeros((RECORD_ROWS, row_size), np.float32)

    @classmethod
    def open(
        cls, directory: str, num_bytes: int, fingerprint: str, model: str, row_size: int
    ) -> Self | None:
        """Open the files of a fingerprint; None where the disk has no room for them.

        Args:
            fingerprint: of the KV store, which names what makes rows, too.
        """
        record_bytes = RECORD_ROWS * row_size * ROW_NUMBER_BYTES
        num_slots = slots_within(num_bytes, record_bytes)
        header = SlotFileHeader(EMBEDDINGS, fingerprint, model, record_bytes, num_slots)
        try:
            files = StoreDirectory(Path(directory), fingerprint, EMBEDDINGS)
            own = {EMBEDDINGS: files.own(header)}
        except OSError as error:
            log.warning("--kv-store %s keeps no embeddings of images: %s", directory, error)
            return None
        return cls(StoreTier(TierName.DISK, own, files), row_size)

    def refresh(self) -> None:
        """Look at what other servers have written."""
        self._tier.refresh()

    def read(self, key: bytes, num_rows: int) -> Floats | None:
        """Return the rows of an image; None where any are not here."""
        found: list[Floats] = []
        for digest, count in self._records(key, num_rows):
            if not self._tier.read(EMBEDDINGS, digest, self._bytes):
                return None
            found.append(self._record[:count].copy())
        return np.concatenate(found) if found else None

    def write(self, key: bytes, rows: Floats) -> None:
        """Keep the rows of an image, unless the disk does not take them."""
        start = 0
        for digest, count in self._records(key, len(rows)):
            self._record[:count] = rows[start : start + count]
            self._record[count:] = 0
            if not self._tier.write(EMBEDDINGS, digest, self._bytes):
                return
            start += count

    @property
    def _bytes(self) -> memoryview:
        return self._record.view(np.uint8).data.cast("B")

    def _records(self, key: bytes, num_rows: int) -> Iterator[tuple[bytes, int]]:
        """Yield the digest and the number of rows of each record of an image."""
        for start in range(0, num_rows, RECORD_ROWS):
            text = repr((key, num_rows, start)).encode()
            digest = blake2b(text, digest_size=DIGEST_BYTES).digest()
            yield digest, min(RECORD_ROWS, num_rows - start)
