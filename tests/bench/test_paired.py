"""Medians of ratios and their intervals."""

import pytest

from support.paired import MIN_PAIRS, interval, measure_pairs, median_ratio


def test_pairs_change_their_order() -> None:
    done: list[str] = []

    def side(name: str) -> float:
        done.append(name)
        return float(len(done))

    assert measure_pairs(2, lambda: side("a"), lambda: side("b")) == ([1, 4], [2, 3])
    assert done == ["a", "b", "b", "a"]


def test_median_ratio_is_that_of_pairs() -> None:
    """A machine that becomes ten times slower changes both sides of a pair."""
    first = [1.0, 10.0, 100.0, 1.0, 10.0, 100.0]
    second = [1.1 * sample for sample in first]
    assert median_ratio(first, second) == pytest.approx((1.1, 1.1, 1.1))


@pytest.mark.parametrize(
    ("count", "low", "high"),  # of a table of binomial ranks
    [(6, 1, 6), (10, 2, 9), (20, 6, 15), (100, 40, 61)],
)
def test_interval_has_the_ranks_of_the_binomial(count: int, low: int, high: int) -> None:
    assert interval([*range(1, count + 1)]) == (low, high)


def test_few_pairs_have_no_interval() -> None:
    with pytest.raises(AssertionError, match="5 pairs have no interval; it takes 6"):
        interval([1.0] * (MIN_PAIRS - 1))
