"""Deaths come with their successors, also when several are in one seat."""

from headrace.board.board import Board, Seat, State
from headrace.tokenizer_proc.ring.death_watch import MAX_DEATHS, DeathWatch

SEATS = [Seat("frontend", 0), Seat("engine", 0), Seat("worker", 0)]
HOW = "was killed by SIGKILL"


def test_a_death_is_news_once_and_so_is_the_return() -> None:
    board = Board.create(SEATS)
    watch = DeathWatch(board)
    assert not watch.look()
    worker = board.slot("worker")
    worker.last_death.record(4711, HOW)
    assert watch.look()
    assert not watch.look()
    (death,) = watch.list()
    assert (death.role, death.index, death.pid, death.how) == ("worker", 0, 4711, HOW)
    assert death.back_at is None
    worker.enter(State.READY)
    assert watch.look()
    assert not watch.look()
    (death,) = watch.list()
    assert death.back_at is not None
    assert death.back_at >= death.died_at


def test_each_death_of_a_seat_is_kept_and_the_oldest_go() -> None:
    board = Board.create(SEATS)
    watch = DeathWatch(board)
    for pid in range(MAX_DEATHS + 3):
        board.slot("engine").last_death.record(pid, HOW)
        watch.look()
    assert [death.pid for death in watch.list()] == list(range(3, MAX_DEATHS + 3))


def test_a_new_watch_has_the_last_death_of_each_seat() -> None:
    board = Board.create(SEATS)
    for role in ("worker", "engine"):
        board.slot(role).last_death.record(1, HOW)
    watch = DeathWatch(board)
    watch.look()
    assert [death.role for death in watch.list()] == ["worker", "engine"], "oldest first"
