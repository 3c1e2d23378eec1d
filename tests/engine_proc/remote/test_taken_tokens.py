"""Tokens that a remote engine has taken, after messages were lost or came late."""

from headrace.board.backlog import Backlog, engine_backlog
from headrace.board.board import Board, Seat, Slot
from headrace.board.fields import EngineField, TokenizerField
from headrace.engine_proc.remote.taken_tokens import IDLE_S, TakenTokens


def session(is_busy: bool = False) -> tuple[Slot, Backlog, TakenTokens]:
    """Return a tokenizer that has sent 10 tokens, a backlog, and a session that begins after."""
    board = Board.create([Seat("tokenizer", 0), Seat("engine", 0)])
    board.slot("tokenizer").add(TokenizerField.SENT_TOKENS, 10)
    board.slot("engine")[EngineField.IS_BUSY] = is_busy
    backlog = engine_backlog(board, 0)
    return board.slot("tokenizer"), backlog, TakenTokens(board.slot("engine"), backlog, 0.0)


def wait(taken: TakenTokens) -> None:
    for look in range(1, 4):
        taken.settle_idle(look * IDLE_S)


def test_a_prompt_that_came_late_counts_once_in_the_end() -> None:
    tokenizer, backlog, taken = session()
    taken.take(10)  # sent before the session, delivered in it
    assert backlog() == -10
    wait(taken)
    assert backlog() == 0
    tokenizer.add(TokenizerField.SENT_TOKENS, 5)
    assert backlog() == 5
    taken.take(15)
    assert backlog() == 0


def test_a_lost_prompt_counts_as_taken_in_the_end() -> None:
    tokenizer, backlog, taken = session()
    tokenizer.add(TokenizerField.SENT_TOKENS, 7)
    assert backlog() == 7
    wait(taken)
    assert backlog() == 0


def test_what_is_on_its_way_to_a_busy_engine_is_not_lost() -> None:
    tokenizer, backlog, taken = session(is_busy=True)
    tokenizer.add(TokenizerField.SENT_TOKENS, 7)
    wait(taken)
    assert backlog() == 7


def test_what_has_just_been_sent_to_an_idle_engine_is_not_lost() -> None:
    tokenizer, backlog, taken = session()
    taken.settle_idle(IDLE_S)
    tokenizer.add(TokenizerField.SENT_TOKENS, 7)
    taken.settle_idle(2 * IDLE_S)
    assert backlog() == 7
