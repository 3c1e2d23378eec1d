"""Rows are allocated once each, stay while they have users, and are freed."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine_proc.images.encoder_cache import EncoderCache

CAT, DOG, OWL = b"cat", b"dog", b"owl"


def test_images_have_rows_of_their_own() -> None:
    pool = EncoderCache(8)
    pool.hold({CAT: 3, DOG: 5})
    assert sorted([*pool.rows(CAT), *pool.rows(DOG)]) == list(range(8))
    assert pool.rows(CAT).tolist() == [0, 1, 2]
    assert pool.num_free == 0


def test_an_image_that_two_need_is_there_once() -> None:
    pool = EncoderCache(8)
    pool.hold({CAT: 8})
    assert pool.can_hold({CAT: 8})
    pool.hold({CAT: 8})
    pool.let_go([CAT])
    assert not pool.can_hold({DOG: 1})
    pool.let_go([CAT])
    assert pool.can_hold({DOG: 8})


def test_unneeded_embedding_is_kept_for_later_requests() -> None:
    pool = EncoderCache(8)
    pool.hold({CAT: 4})
    pool.fill(CAT)
    pool.let_go([CAT])
    assert pool.num_free == 8
    pool.hold({DOG: 4})
    assert pool.is_filled(CAT)
    assert not pool.is_filled(DOG)


def test_an_image_that_was_not_encoded_is_forgotten() -> None:
    pool = EncoderCache(8)
    pool.hold({CAT: 4})
    pool.let_go([CAT])
    assert not pool.is_known(CAT)


def test_images_without_users_may_be_forgotten() -> None:
    pool = EncoderCache(8)
    pool.hold({CAT: 3, DOG: 2})
    pool.fill(CAT)
    pool.fill(DOG)
    pool.let_go([CAT])
    pool.forget_idle()
    assert not pool.is_known(CAT)
    assert pool.is_filled(DOG)
    assert pool.num_free == 6
    pool.let_go([DOG])
    pool.hold({OWL: 8})


def test_what_is_unused_for_longest_goes_first() -> None:
    pool = EncoderCache(6)
    for key in (CAT, DOG, OWL):
        pool.hold({key: 2})
        pool.fill(key)
        pool.let_go([key])
    pool.hold({CAT: 2})
    pool.let_go([CAT])
    pool.hold({b"new": 2})
    assert [pool.is_filled(key) for key in (CAT, DOG, OWL)] == [True, False, True]


def test_images_needed_together_never_evict_each_other() -> None:
    pool = EncoderCache(6)
    pool.hold({CAT: 4})
    pool.fill(CAT)
    pool.let_go([CAT])
    assert pool.can_hold({DOG: 6})
    assert not pool.can_hold({CAT: 4, DOG: 3})
    pool.hold({DOG: 2, CAT: 4})
    assert pool.is_filled(CAT)


def test_double_release_is_noticed() -> None:
    pool = EncoderCache(4)
    pool.hold({CAT: 2})
    pool.fill(CAT)
    pool.let_go([CAT])
    with pytest.raises(AssertionError, match="twice"):
        pool.let_go([CAT])


SIZES = {bytes([key]): 1 + key % 5 for key in range(9)}
WANTED = st.sets(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4)
EVENTS = st.one_of(
    st.tuples(st.just("hold"), WANTED),
    st.tuples(st.just("let go"), st.integers(0, 9)),
    st.tuples(st.just("fill"), st.integers(0, 9)),
)


@given(st.lists(EVENTS, max_size=60))
def test_no_embedding_goes_while_it_is_needed_and_no_row_leaks(
    events: list[tuple[str, object]],
) -> None:
    pool = EncoderCache(16)
    users: list[dict[bytes, int]] = []
    area = [b""] * 16  # whose embedding is in each row
    for event, argument in events:
        if isinstance(argument, set):
            wanted = {key: SIZES[key] for key in sorted(argument)}
            if pool.can_hold(wanted):
                pool.hold(wanted)
                users.append(wanted)
        elif users:
            assert isinstance(argument, int)
            if event == "let go":
                pool.let_go(users.pop(argument % len(users)))
            else:
                needed = sorted({key for user in users for key in user})
                key = needed[argument % len(needed)]
                for row in pool.rows(key):
                    area[row] = key
                pool.fill(key)
        needed_keys = {key for user in users for key in user}
        rows = Counter(row for key in needed_keys for row in pool.rows(key))
        assert set(rows.values()) <= {1}
        assert pool.num_free == 16 - len(rows)
        for key in needed_keys:
            assert len(pool.rows(key)) == SIZES[key]
            assert not pool.is_filled(key) or {area[row] for row in pool.rows(key)} == {key}
    for user in users:
        pool.let_go(user)
    assert pool.num_free == 16
    pool.hold({b"all of it": 16})
    assert sorted(pool.rows(b"all of it")) == list(range(16))
