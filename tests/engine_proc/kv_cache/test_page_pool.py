"""Pages are handed out once each, and come back."""

from array import array

import pytest

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.ipc.page_digests import chain_digests


def test_all_pages_are_free_at_first() -> None:
    pool = PagePool(num_pages=4, page_tokens=16)
    assert pool.num_free == 4
    assert pool.can_allocate(4)
    assert not pool.can_allocate(5)


def test_taken_pages_are_distinct_and_within_the_pool() -> None:
    pool = PagePool(num_pages=4, page_tokens=16)
    assert sorted(pool.allocate(3) + pool.allocate(1)) == [0, 1, 2, 3]
    assert pool.num_free == 0


def test_pages_given_back_can_be_taken_again() -> None:
    pool = PagePool(num_pages=4, page_tokens=16)
    kept = pool.allocate(2)
    pool.free(pool.allocate(2))
    assert sorted(kept + pool.allocate(2)) == [0, 1, 2, 3]


def test_the_newest_freed_page_is_taken_first() -> None:
    pool = PagePool(num_pages=4, page_tokens=16)
    first, second = pool.allocate(2)
    pool.free(array("i", [first]))
    pool.free(array("i", [second]))
    assert pool.allocate(2).tolist() == [second, first]


def test_more_than_there_is_cannot_be_taken() -> None:
    with pytest.raises(AssertionError, match="5 pages wanted, 4 free"):
        PagePool(num_pages=4, page_tokens=16).allocate(5)


def test_pages_given_back_twice_are_noticed() -> None:
    pool = PagePool(num_pages=4, page_tokens=16)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(pages)


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_a_page_begun_is_a_page_needed(num_tokens: int, num_pages: int) -> None:
    assert PagePool(num_pages=4, page_tokens=16).pages_for(num_tokens) == num_pages


def digests_of(tokens: list[int]) -> list[bytes]:
    """Return the digests of pages of two tokens."""
    digests: list[bytes] = []
    chain_digests(digests, array("i", tokens), 2, len(tokens) // 2)
    return digests


def remembered(pool: PagePool, tokens: list[int]) -> list[int]:
    """Fill pages with tokens and let go of them; return the pages."""
    digests = digests_of(tokens)
    pages = pool.allocate(len(digests))
    for page, digest in zip(pages, digests, strict=True):
        pool.cache(page, digest)
    pool.free(pages)
    return pages


def test_a_remembered_prefix_is_shared_as_far_as_it_agrees() -> None:
    pool = PagePool(num_pages=4, page_tokens=2)
    pages = remembered(pool, [1, 2, 3, 4, 5, 6])
    assert pool.match_prefix(digests_of([1, 2, 3, 4, 9, 9])) == pages[:2]
    assert pool.num_free == 2


def test_the_same_tokens_after_others_are_another_page() -> None:
    pool = PagePool(num_pages=4, page_tokens=2)
    remembered(pool, [1, 2, 3, 4])
    assert pool.match_prefix(digests_of([3, 4])).tolist() == []


def test_idle_pages_are_evicted_last_used_last_and_tails_first() -> None:
    pool = PagePool(num_pages=4, page_tokens=2)
    old = remembered(pool, [1, 2, 3, 4])
    new = remembered(pool, [5, 6, 7, 8])
    assert pool.num_free == 4
    assert pool.allocate(1).tolist() == [old[1]]
    assert pool.match_prefix(digests_of([1, 2, 3, 4])).tolist() == [old[0]]
    assert pool.match_prefix(digests_of([5, 6, 7, 8])) == new


def test_an_evicted_page_is_forgotten() -> None:
    pool = PagePool(num_pages=2, page_tokens=2)
    remembered(pool, [1, 2, 3, 4])
    pool.free(pool.allocate(2))
    assert pool.match_prefix(digests_of([1, 2])).tolist() == []


def test_a_page_in_use_is_not_evicted() -> None:
    pool = PagePool(num_pages=2, page_tokens=2)
    pages = remembered(pool, [1, 2])
    assert pool.match_prefix(digests_of([1, 2])) == pages
    assert pool.num_free == 1
    assert pool.allocate(1) != pages


def test_pages_whose_memory_is_lost_hold_nothing() -> None:
    pool = PagePool(num_pages=2, page_tokens=2)
    remembered(pool, [1, 2, 3, 4])
    pool.reset()
    assert pool.match_prefix(digests_of([1, 2, 3, 4])).tolist() == []
    assert sorted(pool.allocate(2)) == [0, 1]
