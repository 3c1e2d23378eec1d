"""Guesses are what the text itself suggests, and cost little when they are wrong."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine_proc.scheduling.ngram_proposer import (
    FIRST_LENGTH,
    MATCH_TOKENS,
    MAX_LENGTH,
    TOKENS_PER_STEP,
    NgramProposer,
    look_up,
)
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.messages import GenerateRequest, Sampling


def make_sequence(tokens: list[int], max_tokens: int = 100) -> Sequence:
    request = GenerateRequest(1, 0, max_tokens, Sampling(), [], b"")
    return Sequence.of(request, array("I", tokens).tobytes())


def look(tokens: list[int], length: int) -> list[int]:
    return look_up(array("i", tokens), length).tolist()


def test_what_followed_before_follows_again() -> None:
    assert look([1, 2, 3, 4, 5, 6, 1, 2, 3], 2) == [4, 5]


def test_the_latest_occurrence_counts() -> None:
    assert look([1, 2, 7, 7, 1, 2, 8, 8, 1, 2], 1) == [8]


def test_a_longer_match_goes_before_a_later_one() -> None:
    assert look([1, 2, 3, 4, 5, 0, 3, 4, 6, 0, 1, 2, 3, 4], 1) == [5]


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert look([9, 1, 2, 1, 2], 6) == [1, 2, 1, 2, 1, 2]
    assert look([5, 5, 5], 4) == [5, 5, 5, 5]


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2, 3, 4], [2, 1, 1, 1 << 8, 1]])
def test_no_match_no_guess(tokens: list[int]) -> None:
    assert look(tokens, 4) == []


def test_matches_are_of_whole_tokens() -> None:
    # The bytes of [1, 1] occur across the borders of these, but not the tokens.
    assert look([0x0100_0000, 0x0100_0000, 0, 7, 1, 1], 2) == []


def naive(tokens: list[int], length: int) -> list[int]:
    for size in MATCH_TOKENS:
        for place in range(len(tokens) - size - 1, -1, -1):
            if tokens[place : place + size] == tokens[len(tokens) - size :]:
                copied = list(tokens)
                for source in range(place + size, place + size + length):
                    copied.append(copied[source])
                return copied[len(tokens) :]
    return []


@given(st.lists(st.sampled_from([0, 1, 2, 256]), min_size=1, max_size=40), st.integers(1, 20))
def test_look_up_is_the_plain_search(tokens: list[int], length: int) -> None:
    assert look(tokens, length) == naive(tokens, length)


def test_fewer_guesses_the_more_sequences_run() -> None:
    sequence = make_sequence([1, 2] * 20)
    sequence.draft_length = MAX_LENGTH
    lengths = [len(NgramProposer().propose(sequence, n)) for n in range(1, TOKENS_PER_STEP + 2)]
    assert lengths[0] == MAX_LENGTH
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0
    assert all(n * (1 + length) <= max(n, TOKENS_PER_STEP) for n, length in enumerate(lengths, 1))


def test_no_guess_beyond_max_tokens() -> None:
    assert len(NgramProposer().propose(make_sequence([1, 2] * 20, max_tokens=3), 1)) == 2
    assert len(NgramProposer().propose(make_sequence([1, 2] * 20, max_tokens=1), 1)) == 0


def test_guesses_grow_while_they_are_right_and_shrink_when_not() -> None:
    lookup, sequence = NgramProposer(), make_sequence([1, 2] * 20)
    lengths = []
    for _ in range(4):
        lengths.append(len(lookup.propose(sequence, 1)))
        lookup.learn(sequence, lengths[-1], lengths[-1])
    assert lengths == [FIRST_LENGTH, 2 * FIRST_LENGTH, MAX_LENGTH, MAX_LENGTH]
    lookup.learn(sequence, MAX_LENGTH, 3)
    assert len(lookup.propose(sequence, 1)) == 3
    lookup.learn(sequence, 3, 0)
    assert len(lookup.propose(sequence, 1)) == 1
