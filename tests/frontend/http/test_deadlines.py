"""Deadlines expire in order of their start, and never early."""

from headrace.frontend.http.deadlines import Deadlines


def test_time_is_up_in_the_order_of_beginning() -> None:
    deadlines: Deadlines[str] = Deadlines(10)
    deadlines.start("a", 0)
    deadlines.start("b", 3)
    deadlines.start("c", 5)
    assert list(deadlines.passed(9.9)) == []
    assert list(deadlines.passed(13)) == ["a", "b"]
    assert list(deadlines.passed(13)) == []
    assert len(deadlines) == 1


def test_beginning_again_is_a_new_beginning() -> None:
    deadlines: Deadlines[str] = Deadlines(10)
    deadlines.start("a", 0)
    deadlines.start("b", 1)
    deadlines.start("a", 5)
    assert list(deadlines.passed(12)) == ["b"]
    assert list(deadlines.passed(15)) == ["a"]


def test_stopped_deadline_is_not_due() -> None:
    deadlines: Deadlines[str] = Deadlines(10)
    deadlines.start("a", 0)
    deadlines.stop("a")
    deadlines.stop("a")
    assert list(deadlines.passed(100)) == []


def test_due_deadline_may_begin_again() -> None:
    deadlines: Deadlines[str] = Deadlines(10)
    deadlines.start("a", 0)
    for client in deadlines.passed(10):
        deadlines.start(client, 10)
    assert len(deadlines) == 1
