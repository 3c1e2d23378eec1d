"""What was said before an engine died is there for a while, and once."""

from array import array

from headrace.engine_proc.resume_cache import KEEP_ENDED_S, KEEP_S, ResumeCache
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.messages import GeneratedTokens, GenerateRequest, Sampling


def make_legacy() -> ResumeCache:
    legacy = ResumeCache()
    said = GeneratedTokens(array("Q", [5, 6]).tobytes(), array("I", [2, 1]).tobytes())
    legacy.keep(said, array("I", [1, 2, 3]).tobytes(), now=100.0)
    return legacy


def test_each_sequence_has_its_own_once() -> None:
    legacy = make_legacy()
    assert legacy.take(6).tolist() == [3]
    assert legacy.take(5).tolist() == [1, 2]
    assert legacy.take(5).tolist() == legacy.take(7).tolist() == []


def test_what_nobody_takes_up_is_forgotten() -> None:
    legacy = make_legacy()
    legacy.forget_old(100.0 + KEEP_S, are_serving=True)
    assert legacy.take(5).tolist() == [1, 2]
    legacy.forget_old(100.5 + KEEP_S, are_serving=True)
    assert legacy.take_ended(6) is None


def ended(id: int) -> Sequence:
    request = GenerateRequest(id, 0, 8, Sampling(), [], b"")
    sequence = Sequence.of(request, array("I", [1, 2]).tobytes())
    sequence.tokens.extend([7, 8])
    return sequence


def test_what_has_ended_is_there_until_its_end_has_been_told() -> None:
    legacy = ResumeCache()
    five, six = ended(5), ended(6)
    legacy.keep_ended(five, 100.0)
    legacy.keep_ended(six, 101.0)
    legacy.forget_old(100.5 + KEEP_ENDED_S, are_serving=True)
    assert legacy.take_ended(5) is None
    assert legacy.take_ended(6) is six
    assert legacy.take_ended(6) is None


def test_results_outlive_the_absence_of_a_detokenizer() -> None:
    legacy = ResumeCache()
    five = ended(5)
    legacy.keep_ended(five, 100.0)
    legacy.forget_old(100.0 + 10 * KEEP_ENDED_S, are_serving=False)
    legacy.forget_old(100.0 + 11 * KEEP_ENDED_S - 0.5, are_serving=True)
    assert legacy.take_ended(5) is five
    legacy.keep_ended(ended(6), 100.0)
    legacy.forget_old(100.5 + 11 * KEEP_ENDED_S, are_serving=True)
    assert legacy.take_ended(6) is None
