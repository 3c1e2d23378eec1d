"""A text suggests what followed its last tokens before."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine_proc.drafts.ngram_proposer import (
    MATCH_TOKENS,
    MAX_ANSWERS,
    RecentAnswers,
    look_up,
)


def look(tokens: list[int], length: int) -> list[int]:
    return look_up(array("i", tokens), length).tokens.tolist()


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


def test_recent_answer_suggests_what_it_went_on_with() -> None:
    answers = RecentAnswers()
    answers.add(b"", array("i", range(20)))
    assert answers.look_up(b"", array("i", range(3, 12)), 4).tokens.tolist() == [12, 13, 14, 15]
    assert not answers.look_up(b"", array("i", range(3, 10)), 4).tokens
    assert not answers.look_up(b"salt", array("i", range(3, 12)), 4).tokens


def test_newest_answers_are_kept() -> None:
    answers = RecentAnswers()
    for first in range(MAX_ANSWERS + 1):
        answers.add(b"", array("i", range(100 * first, 100 * first + 20)))
    assert not answers.look_up(b"", array("i", range(9)), 4).tokens
    assert answers.look_up(b"", array("i", range(100, 109)), 2).tokens.tolist() == [109, 110]
