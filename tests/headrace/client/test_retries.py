"""Retries wait for Retry-After; without it, longer each time."""

import pytest

from headrace.client.retries import Retries, retry_after_s

NOW = 1_000_000_000.0  # Sun, 09 Sep 2001 01:46:40 GMT


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("Sun, 09 Sep 2001 01:47:00 GMT", 20.0),
        ("Sun, 09 Sep 2001 01:46:00 GMT", 0.0),
        ("soon", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, expected: float | None) -> None:
    assert retry_after_s({"retry-after": value}, NOW) == expected


def test_no_retry_after_is_none() -> None:
    assert retry_after_s({}, NOW) is None


@pytest.mark.parametrize("status", [200, 400, 401, 404, 413, 500, 502])
def test_what_is_not_for_lack_of_room_is_not_asked_again(status: int) -> None:
    assert Retries(9).wait_s(status, {"retry-after": "1"}, 0) is None


def test_waits_double_where_the_server_says_nothing() -> None:
    waits = [Retries(3).wait_s(429, {}, num_before) for num_before in range(4)]
    assert waits == [0.5, 1.0, 2.0, None]


def test_more_than_a_minute_is_not_waited_for() -> None:
    assert Retries(3).wait_s(503, {"retry-after": "60"}, 0) == 60
    assert Retries(3).wait_s(503, {"retry-after": "61"}, 0) is None
