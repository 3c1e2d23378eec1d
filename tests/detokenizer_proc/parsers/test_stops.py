"""The text ends where the first stop string is complete, however it comes in pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.detokenizer_proc.parsers.stops import StopMatcher, overlap

# Two letters make overlaps, repeats and stops within stops likely.
texts = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str], include_stop: bool) -> tuple[str, bool]:
    """Return the text up to the stop string that is complete first, by looking at every prefix."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include_stop else end - max(map(len, ending))], True
    return text, False


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def feed_all(matcher: StopMatcher, pieces: list[str]) -> str:
    given = ""
    for piece in pieces:
        given += matcher.feed(piece)
        if matcher.stopped:
            return given
    return given + matcher.flush()


@given(
    text=texts,
    cuts=st.lists(st.integers(0, 30), max_size=30),
    stops=stop_lists,
    include_stop=st.booleans(),
)
def test_output_is_the_text_up_to_the_first_complete_stop(
    text: str, cuts: list[int], stops: list[str], include_stop: bool
) -> None:
    matcher = StopMatcher(stops, include_stop)
    output = feed_all(matcher, in_pieces(text, cuts))
    assert (output, matcher.stopped) == cut(text, stops, include_stop)


@given(text=texts, stops=stop_lists)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given = ""
    for end, letter in enumerate(text, 1):
        given += matcher.feed(letter)
        if matcher.stopped:
            return
        held = text[len(given) : end]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_without_stops_all_text_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert (matcher.feed("abc"), matcher.flush(), matcher.stopped) == ("abc", "", False)


def test_a_stop_over_three_pieces_is_found() -> None:
    matcher = StopMatcher(["</s>"])
    assert [matcher.feed(piece) for piece in ("Hi<", "/", "s> more")] == ["Hi", "", ""]
    assert matcher.stopped


def test_what_only_looked_like_a_stop_is_given_out() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.feed(piece) for piece in ("the E", "N", "T")] == ["the ", "", "ENT"]
    assert not matcher.stopped


def test_the_stop_stays_where_it_is_wanted() -> None:
    matcher = StopMatcher(["END"], include_stop=True)
    assert matcher.feed("the E") + matcher.feed("ND and more") == "the END"


def test_how_text_is_cut_does_not_change_which_stop_ends_it() -> None:
    stops = ["abcd", "c"]
    assert StopMatcher(stops).feed("xabcd") == "xab"
    matcher = StopMatcher(stops)
    assert matcher.feed("xab") + matcher.feed("c") == "xab"


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [("", "abc", 0), ("xab", "abc", 2), ("abc", "abc", 0), ("xa", "abc", 1), ("aa", "aab", 2)],
)
def test_overlap_is_the_longest_end_that_begins_the_stop(text: str, stop: str, length: int) -> None:
    assert overlap(text, stop) == length
