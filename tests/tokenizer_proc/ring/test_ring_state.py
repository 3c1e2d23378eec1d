"""A state has of every process what the board has of it."""

import os
from typing import Any

import msgspec

from headrace.board.board import Board, Seat, State
from headrace.board.fields import (
    CommonField,
    DetokenizerField,
    EngineField,
    FrontendField,
    TokenizerField,
)
from headrace.config.process_configs import ModelCard, TokenizerConfig
from headrace.tokenizer_proc.ring.death_watch import DeathWatch
from headrace.tokenizer_proc.ring.ring_state import RingReader, RingState

SEATS = [
    *(Seat("frontend", i) for i in range(2)),
    *(Seat("tokenizer", i) for i in range(4)),
    Seat("engine", 0),
    Seat("worker", 0),
    Seat("worker", 1),
    Seat("vision", 0),
    Seat("detokenizer", 0),
    Seat("fetcher", 0),
]


def make_config(**fields: Any) -> TokenizerConfig:
    card = ModelCard(
        path="",
        name="org/tiny",
        max_model_len=128,
        vocab_size=256,
        eos_token_ids=[],
        chat_template=None,
        special_tokens={},
    )
    return TokenizerConfig(
        run_dir="",
        cards=(card,),
        num_frontends=2,
        num_detokenizers=1,
        seed=0,
        started_at=77,
        num_tokenizers=1,
        max_batch_size=32,
        batch_wait_ms=2,
        **fields,
    )


def make_ring() -> tuple[Board, RingReader]:
    board = Board.create(SEATS)
    for slot in board.slots:
        slot.enter(State.STARTING)
        slot.enter(State.READY)
    return board, RingReader(board, make_config(), DeathWatch(board))


def test_every_process_is_in_its_seat() -> None:
    _, reader = make_ring()
    state = reader.read()
    groups = (
        state.frontends,
        state.tokenizers,
        state.engines,
        state.workers,
        state.visions,
        state.detokenizers,
        state.fetchers,
    )
    assert [len(group) for group in groups] == [2, 4, 1, 2, 1, 1, 1]
    for group in groups:
        assert [process.index for process in group] == list(range(len(group)))
        for process in group:
            assert (process.state, process.fault, process.restarts) == ("ready", None, 0)
            assert process.pid == os.getpid()
            assert process.resident_bytes > 0
    duties = ["text", "long text", "images", "GET"]
    assert [tokenizer.duty for tokenizer in state.tokenizers] == duties
    assert state.model == "org/tiny"
    assert msgspec.json.decode(msgspec.json.encode(state), type=RingState) == state


def test_requests_are_counted_by_the_hop_they_are_at() -> None:
    board, reader = make_ring()
    board.slot("frontend", 0)[FrontendField.ADMITTED] = 5
    board.slot("frontend", 1)[FrontendField.ADMITTED] = 4
    board.slot("frontend", 1)[FrontendField.UNSENT_BYTES] = 99
    board.slot("engine")[EngineField.WAITING] = 2
    board.slot("engine")[EngineField.RUNNING] = 3
    board.slot("detokenizer")[DetokenizerField.OPEN_RESPONSES] = 3
    for index in range(2):
        board.slot("frontend", index).add(FrontendField.FORWARDED, 6)
        board.slot("frontend", index).add(FrontendField.FORWARDED_BYTES, 100)
    board.slot("tokenizer").add(TokenizerField.HANDLED, 8)
    flight = reader.read().in_flight
    assert (flight.admitted, flight.tokenizing, flight.waiting, flight.running) == (9, 4, 2, 3)
    assert (flight.rendering, flight.unsent_bytes) == (3, 99)


def test_requests_lost_with_a_tokenizer_are_not_counted_for_ever() -> None:
    board, reader = make_ring()
    frontend, tokenizer = board.slot("frontend", 0), board.slot("tokenizer")
    frontend.add(FrontendField.FORWARDED, 4)
    frontend.add(FrontendField.FORWARDED_BYTES, 40)
    assert reader.read().in_flight.tokenizing == 4
    tokenizer.add(TokenizerField.HANDLED_BYTES, 40)  # its successor settles the backlog
    assert reader.read().in_flight.tokenizing == 0
    frontend.add(FrontendField.FORWARDED, 1)
    frontend.add(FrontendField.FORWARDED_BYTES, 10)
    assert reader.read().in_flight.tokenizing == 1


def test_a_dead_process_is_marked_as_dead() -> None:
    board, reader = make_ring()
    worker = board.slot("worker", 1)
    worker[CommonField.STATE] = State.DEAD
    found = reader.read().workers[1]
    assert (found.state, found.fault, found.resident_bytes) == ("dead", "worker 1 is dead", 0)
    worker.enter(State.STARTING)
    found = reader.read().workers[1]
    assert (found.state, found.restarts) == ("starting", 1)


def test_speed_is_zero_where_nothing_runs() -> None:
    board, reader = make_ring()
    engine = board.slot("engine")
    engine[EngineField.TOKENS_PER_SECOND] = 450
    assert reader.read().engines[0].tokens_per_s == 0
    engine[EngineField.RUNNING] = 1
    assert reader.read().engines[0].tokens_per_s == 450


def test_drafts_and_state_slots_are_told() -> None:
    board, reader = make_ring()
    engine = board.slot("engine")
    engine[EngineField.DRAFTS], engine[EngineField.RIGHT_DRAFTS] = 9, 4
    engine[EngineField.STATES_TOTAL], engine[EngineField.STATES_FREE] = 8, 3
    found = reader.read().engines[0]
    assert (found.drafts, found.right_drafts) == (9, 4)
    assert (found.state_slots, found.state_slots_free) == (8, 3)
