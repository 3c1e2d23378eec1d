"""What was said before an engine died is there for a while, and once."""

from array import array

from headrace.engine_proc.legacy import KEEP_S, Legacy
from headrace.messages import Said


def make_legacy() -> Legacy:
    legacy = Legacy()
    said = Said(array("Q", [5, 6]).tobytes(), array("I", [2, 1]).tobytes())
    legacy.keep(said, array("I", [1, 2, 3]).tobytes(), now=100.0)
    return legacy


def test_each_sequence_has_its_own_once() -> None:
    legacy = make_legacy()
    assert legacy.take(6).tolist() == [3]
    assert legacy.take(5).tolist() == [1, 2]
    assert legacy.take(5).tolist() == legacy.take(7).tolist() == []


def test_what_nobody_takes_up_is_forgotten() -> None:
    legacy = make_legacy()
    legacy.forget_old(100.0 + KEEP_S)
    assert legacy.take(5).tolist() == [1, 2]
    legacy.forget_old(100.5 + KEEP_S)
    assert legacy.take(6).tolist() == []
