"""What is not renewed lapses; what is renewed, or gone, does not."""

from headrace.engine_proc.request_io.leases import Leases


def test_a_new_request_has_a_lease() -> None:
    leases = Leases(10)
    assert leases.expired([1, 2], now=0) == []
    assert leases.expired([1, 2], now=10) == []
    assert leases.expired([1, 2], now=10.5) == []
    assert leases.expired([1, 2], now=11) == [1, 2]


def test_renewing_keeps_a_request() -> None:
    leases = Leases(10)
    leases.expired([1, 2], now=0)
    leases.renew([2], now=9)
    assert leases.expired([1, 2], now=11) == []
    assert leases.expired([1, 2], now=12) == [1]
    assert leases.expired([2], now=19.5) == []
    assert leases.expired([2], now=20) == [2]


def test_where_a_machine_stood_still_there_is_time_to_renew() -> None:
    leases = Leases(10)
    leases.expired([1, 2], now=0)
    assert leases.expired([1, 2], now=60) == [], "the frontend has not been awake either"
    leases.renew([1], now=60.1)
    assert leases.expired([1, 2], now=61) == [2]
    assert leases.expired([1], now=120) == [], "it had been renewed since it was overdue"


def test_renewing_may_come_before_the_request() -> None:
    leases = Leases(10)
    leases.renew([7], now=0)
    assert leases.expired([7], now=9) == []
    assert leases.expired([7], now=11) == []
    assert leases.expired([7], now=12) == [7]


def test_a_request_that_has_left_is_forgotten() -> None:
    leases = Leases(10)
    leases.expired([1], now=0)
    assert leases.expired([], now=20) == []
    assert leases.expired([1], now=20) == [], "an id that comes again is new"
