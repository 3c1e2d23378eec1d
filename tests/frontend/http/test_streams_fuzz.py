"""Clients hear what was said, whatever their sockets take at a time, and nothing but that."""

from pathlib import Path

from sanitized import fuzz


def test_streams_are_whole_and_keep_to_their_memory(tmp_path: Path) -> None:
    fuzz(Path(__file__).with_name("streams_fuzz.cpp"), "http/streams.cpp", tmp_path)
