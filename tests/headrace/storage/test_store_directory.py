"""Servers that share a directory see each other's files."""

import os
from pathlib import Path

from headrace.storage.slot_file import SlotFileHeader
from headrace.storage.store_directory import StoreDirectory

FINGERPRINT = "f" * 32
HEADER = SlotFileHeader("pages", FINGERPRINT, "model", record_bytes=64, num_slots=2)


def test_file_of_another_server_is_opened_once(tmp_path: Path) -> None:
    mine, other = (StoreDirectory(tmp_path, FINGERPRINT) for _ in range(2))
    mine.own(HEADER)
    other.own(HEADER)
    (reader,) = mine.others(HEADER)
    assert len(reader) == 0
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert mine.others(HEADER) == [reader], "an empty one, too"
    assert len(os.listdir("/proc/self/fd")) == num_open
