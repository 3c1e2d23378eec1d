"""Pages are handed out once each, and come back."""

import pytest

from headrace.engine_proc.page_pool import PagePool


def test_all_pages_are_free_at_first() -> None:
    pool = PagePool(num_pages=4, page_tokens=16)
    assert pool.num_free == 4
    assert pool.can_take(4)
    assert not pool.can_take(5)


def test_taken_pages_are_distinct_and_within_the_pool() -> None:
    pool = PagePool(num_pages=4, page_tokens=16)
    assert sorted(pool.take(3) + pool.take(1)) == [0, 1, 2, 3]
    assert pool.num_free == 0


def test_pages_given_back_can_be_taken_again() -> None:
    pool = PagePool(num_pages=4, page_tokens=16)
    kept = pool.take(2)
    pool.give_back(pool.take(2))
    assert sorted(kept + pool.take(2)) == [0, 1, 2, 3]


def test_the_newest_freed_page_is_taken_first() -> None:
    pool = PagePool(num_pages=4, page_tokens=16)
    first, second = pool.take(2)
    pool.give_back([first])
    pool.give_back([second])
    assert pool.take(2) == [second, first]


def test_more_than_there_is_cannot_be_taken() -> None:
    with pytest.raises(AssertionError, match="5 pages wanted, 4 free"):
        PagePool(num_pages=4, page_tokens=16).take(5)


def test_pages_given_back_twice_are_noticed() -> None:
    pool = PagePool(num_pages=4, page_tokens=16)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(pages)


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_a_page_begun_is_a_page_needed(num_tokens: int, num_pages: int) -> None:
    assert PagePool(num_pages=4, page_tokens=16).pages_for(num_tokens) == num_pages
