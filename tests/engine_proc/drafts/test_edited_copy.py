"""A text that copies and replaces is expected to go on with both."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine_proc.drafts.edited_copy import EditedCopy

SOURCE = [1, 2, 3, 9, 4, 5, 9, 6, 7, 9, 8]  # in which 9 is replaced
TRUST = 8


def copied(written: list[int], length: int = 4) -> list[int] | None:
    """Return what is expected behind a text that copies SOURCE; None if nothing is."""
    copy = EditedCopy()
    copy.begin(0, TRUST)
    tokens = array("i", SOURCE + written)
    copy.follow(tokens, len(SOURCE))
    return copy.suggest(tokens, length).tolist() if copy.goes_on else None


def test_copy_goes_on() -> None:
    assert copied([1, 2]) == [3, 9, 4, 5]


def test_copy_goes_on_behind_an_edit() -> None:
    assert copied([1, 2, 3, 50]) == [4, 5, 9, 6]


def test_edit_is_expected_again() -> None:
    assert copied([1, 2, 3, 50, 4]) == [5, 50, 6, 7]


def test_edit_of_several_tokens_is_expected_again() -> None:
    assert copied([1, 2, 3, 50, 51, 4, 5]) == [50, 51, 6, 7]
    assert copied([1, 2, 3, 50, 51, 4, 5, 50]) == [51, 6, 7, 50]


def test_token_that_is_copied_after_all_is_no_longer_edited() -> None:
    assert copied([1, 2, 3, 50, 4, 5, 9, 6]) == [7, 9, 8, 1]


def test_text_that_goes_its_own_way_is_no_copy() -> None:
    assert copied([1, 2, 3, 50, 51, 52]) is not None
    assert copied([1, 2, 3, 50, 51, 52, 53]) is None


def test_known_edits_cost_no_trust() -> None:
    assert copied([1, 2, 3, 50, 51, 52, 4, 5, 50, 51, 52, 6, 7, 50, 51, 52]) == [8, 1, 2, 3]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(0, 8),
)
def test_whatever_is_written_can_be_followed(
    source: list[int], written: list[int], trust: int
) -> None:
    tokens = array("i", source)
    copy = EditedCopy()
    copy.begin(0, trust)
    for token in written:
        tokens.append(token)
        copy.follow(tokens, len(tokens) - 1)
        if copy.goes_on:
            assert len(copy.suggest(tokens, 5)) <= 5
