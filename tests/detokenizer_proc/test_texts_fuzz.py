"""The core of the detokenizer touches no memory but its own, whatever it is called with."""

from pathlib import Path

from sanitized import fuzz


def test_the_core_keeps_to_its_memory(tmp_path: Path) -> None:
    fuzz(Path(__file__).with_name("texts_fuzz.cpp"), "text/detokenizer.cpp", tmp_path)
