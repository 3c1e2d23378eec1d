"""Addresses of what is placed, in files."""

from pathlib import Path

from headrace.runtime.placed_address import PlacedAddress


def test_an_address_is_there_until_it_is_withdrawn(tmp_path: Path) -> None:
    written, read = (PlacedAddress(str(tmp_path), "engine 1") for _ in range(2))
    assert read.read() is None
    for where in ("tcp://a:1", "tcp://b:22222"):
        written.write(where)
        assert read.read() == where
    assert PlacedAddress(str(tmp_path), "engine 2").read() is None
    for _ in range(2):
        written.write(None)
        assert read.read() is None
    assert not list(tmp_path.iterdir())
