"""An hour of figures, in bounded memory; percentiles are those of what was observed."""

import tracemalloc

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from headrace.board.board import Board, Seat, Timing
from headrace.board.fields import EngineField
from headrace.board.histogram import SECONDS
from headrace.tokenizer_proc.ring.history import (
    INTERVAL_S,
    LATENCIES,
    NUM_POINTS,
    History,
    percentile,
)

SEATS = [Seat("frontend", 0), Seat("frontend", 1), Seat("engine", 0)]
MAX_BYTES = 1 << 20


def test_rates_and_shares_are_of_the_interval() -> None:
    board = Board.create(SEATS)
    engine = board.slot("engine")
    engine.add(EngineField.GENERATED_TOKENS, 1_000_000)
    history = History(board, now=100.0)
    engine.add(EngineField.GENERATED_TOKENS, 500)
    engine.add(EngineField.PREFIX_QUERIES, 200)
    engine.add(EngineField.PREFIX_HITS, 50)
    engine[EngineField.RUNNING] = 7
    engine[EngineField.PAGES_TOTAL], engine[EngineField.PAGES_FREE] = 400, 100
    engine[EngineField.MODEL] = 1  # the second of two
    board.slot("frontend", 1).of_model(1).histogram(Timing.FIRST_TOKEN).observe(30_000_000)
    point = history.add(now=110.0, at=1e9)
    assert point.at == 1e9
    assert point.generated_tokens_per_s == 50
    assert (point.running, point.kv_usage, point.prefix_hit_rate) == (7, 0.75, 0.25)
    assert point.time_to_first_token_p50_s is not None
    assert 0.02 < point.time_to_first_token_p50_s <= 0.03
    assert point.e2e_latency_p99_s is None, "nothing has ended"
    point = history.add(now=120.0, at=1e9 + 10)
    assert (point.generated_tokens_per_s, point.prefix_hit_rate) == (0, None)
    assert point.time_to_first_token_p50_s is None


def test_distributions_forget_what_is_older_than_the_hour() -> None:
    board = Board.create(SEATS)
    history = History(board, now=0.0)
    between = board.slot("engine").histogram(Timing.BETWEEN)
    between.observe(3_000_000, times=5)
    history.add(INTERVAL_S, 1e9)
    between.observe(3_000_000, times=2)
    for number in range(NUM_POINTS - 1):
        history.add(INTERVAL_S * (number + 2), 1e9)
    found = history.distributions()["inter_token_latency"]
    assert sum(found.counts) == 7
    assert found.counts[found.bounds.index(0.005)] == 7
    history.add(INTERVAL_S * (NUM_POINTS + 1), 1e9)
    assert sum(history.distributions()["inter_token_latency"].counts) == 2


def test_an_hour_takes_less_than_a_megabyte() -> None:
    board = Board.create(SEATS)
    tracemalloc.start()
    history = History(board, now=0.0)
    for number in range(2 * NUM_POINTS):
        for source in LATENCIES.values():
            board.slot(source.role).histogram(source.span).observe(10**6 * number, times=10**6)
        board.slot("engine").add(EngineField.GENERATED_TOKENS, 12345)
        history.add((number + 1) * INTERVAL_S, 1e9 + number)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < MAX_BYTES
    hour = history.hour()
    assert {len(column) for column in hour.columns.values()} == {NUM_POINTS}
    assert len(msgspec.json.encode(hour)) < 64 << 10


@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=50),
    st.floats(0.01, 1.0),
)
def test_percentile_is_in_the_bucket_of_the_true_one(amounts: list[int], share: float) -> None:
    histogram = Board.create([Seat("engine", 0)]).slot("engine").histogram(Timing.BETWEEN)
    for amount in amounts:
        histogram.observe(amount)
    counts = histogram.counts
    up_to = [sum(counts[: place + 1]) for place in range(len(counts))]
    found = percentile(SECONDS.bounds, up_to, share)
    true = sorted(amounts)[max(-int(-share * len(amounts) // 1) - 1, 0)] / 1e9
    bounds = (0.0, *SECONDS.bounds)
    low, high = max(b for b in bounds if b < true), min(b for b in bounds if b >= true)
    assert found is not None
    assert low <= found <= high


def test_percentile_of_nothing_is_none() -> None:
    assert percentile((0.1, 0.2), [0, 0, 0], 0.99) is None
    assert percentile((0.1, 0.2), [0, 0, 4], 0.5) == pytest.approx(0.2), "beyond all bounds"
