"""What was said before an engine died is there for a while, and once."""

from array import array

from headrace.engine_proc.request_io.resume_cache import KEEP_ENDED_S, KEEP_S, ResumeCache
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.messages import GeneratedTokens, GenerateRequest, Sampling


def make_legacy() -> ResumeCache:
    resume_cache = ResumeCache()
    said = GeneratedTokens(array("Q", [5, 6]).tobytes(), array("I", [2, 1]).tobytes())
    resume_cache.keep(said, array("I", [1, 2, 3]).tobytes(), now=100.0)
    return resume_cache


def test_each_sequence_has_its_own_once() -> None:
    resume_cache = make_legacy()
    assert resume_cache.take([6]).tolist() == [3]
    assert resume_cache.take([5]).tolist() == [1, 2]
    assert resume_cache.take([5]).tolist() == resume_cache.take([7]).tolist() == []


def test_a_sequence_takes_the_most_tokens_of_its_ids() -> None:
    resume_cache = make_legacy()
    assert resume_cache.take([7, 6, 5]).tolist() == [1, 2]
    assert not resume_cache.take([6]), "they are taken with them"


def test_unclaimed_tokens_expire() -> None:
    resume_cache = make_legacy()
    resume_cache.forget_old(100.0 + KEEP_S, are_serving=True)
    assert resume_cache.take([5]).tolist() == [1, 2]
    resume_cache.forget_old(100.5 + KEEP_S, are_serving=True)
    assert resume_cache.take_ended(6) is None


def ended(id: int) -> Sequence:
    request = GenerateRequest(id, 0, 8, Sampling(), [], b"")
    sequence = Sequence.of(request, array("I", [1, 2]).tobytes())
    sequence.tokens.extend([7, 8])
    return sequence


def test_ended_sequence_is_kept_until_its_end_is_delivered() -> None:
    resume_cache = ResumeCache()
    five, six = ended(5), ended(6)
    resume_cache.keep_ended(five, 100.0)
    resume_cache.keep_ended(six, 101.0)
    resume_cache.forget_old(100.5 + KEEP_ENDED_S, are_serving=True)
    assert resume_cache.take_ended(5) is None
    assert resume_cache.take_ended(6) is six
    assert resume_cache.take_ended(6) is None


def test_results_outlive_the_absence_of_a_detokenizer() -> None:
    resume_cache = ResumeCache()
    five = ended(5)
    resume_cache.keep_ended(five, 100.0)
    resume_cache.forget_old(100.0 + 10 * KEEP_ENDED_S, are_serving=False)
    resume_cache.forget_old(100.0 + 11 * KEEP_ENDED_S - 0.5, are_serving=True)
    assert resume_cache.take_ended(5) is five
    resume_cache.keep_ended(ended(6), 100.0)
    resume_cache.forget_old(100.5 + 11 * KEEP_ENDED_S, are_serving=True)
    assert resume_cache.take_ended(6) is None


def test_tokens_name_the_sequences_that_have_begun_without_them() -> None:
    resume_cache = ResumeCache()
    resume_cache.begin([5, 4], 9, 100.0)
    resume_cache.begin([6], 10, 100.0)
    said = GeneratedTokens(array("Q", [4, 7]).tobytes(), array("I", [1, 1]).tobytes())
    assert resume_cache.keep(said, array("I", [1, 2]).tobytes(), 100.0) == [9]
    resume_cache.forget_old(100.5 + KEEP_S, are_serving=True)
    said = GeneratedTokens(array("Q", [6]).tobytes(), array("I", [1]).tobytes())
    assert resume_cache.keep(said, array("I", [1]).tobytes(), 200.0) == [], "it came too late"
