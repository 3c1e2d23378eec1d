"""What /metrics says is what the board says."""

import os
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace.board import Board, Field, Seat, Span, State
from headrace.metrics import COUNTERS, GAUGES, HISTOGRAMS, HOPS, render_metrics

SEATS = [
    Seat("frontend", 0),
    Seat("frontend", 1),
    Seat("tokenizer", 0),
    Seat("engine", 0),
    Seat("worker", 0),
    Seat("detokenizer", 0),
]


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(SEATS)
    yield made
    os.close(made.fd)


def families(board: Board, model: str = "tiny") -> dict[str, Metric]:
    text = render_metrics(board, model).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: Metric) -> dict[str, float]:
    return {sample.labels["process"]: sample.value for sample in family.samples}


def test_every_process_is_up_or_not(board: Board) -> None:
    board.slot("frontend", 1).enter(State.READY)
    up = values(families(board)["headrace:process_up"])
    assert up == {str(seat): float(seat == Seat("frontend", 1)) for seat in SEATS}


def test_every_counter_and_gauge_shows_its_own_field(board: Board) -> None:
    for number, (_, _, role, field) in enumerate([*COUNTERS, *GAUGES], 1):
        for slot in board.of(role):
            slot[field] = 100 * number + slot.seat.index
    found = families(board)
    for number, (name, _, role, _) in enumerate([*COUNTERS, *GAUGES], 1):
        expected = {str(s.seat): 100.0 * number + s.seat.index for s in board.of(role)}
        assert values(found[f"headrace:{name}"]) == expected, name


def test_counters_are_counters_and_gauges_are_gauges(board: Board) -> None:
    found = families(board)
    assert {found[f"headrace:{name}"].type for name, *_ in COUNTERS} == {"counter"}
    assert {found[f"headrace:{name}"].type for name, *_ in GAUGES} == {"gauge"}


def test_cache_usage_is_a_share(board: Board) -> None:
    slot = board.slot("engine")
    assert values(families(board)["headrace:kv_cache_usage_perc"]) == {"engine 0": 0}
    slot[Field.PAGES_TOTAL], slot[Field.PAGES_FREE] = 8, 6
    assert values(families(board)["headrace:kv_cache_usage_perc"]) == {"engine 0": 0.25}


def test_the_longest_callback_is_in_seconds(board: Board) -> None:
    board.slot("frontend", 1)[Field.LONGEST_CALLBACK_NS] = 12_000_000
    longest = values(families(board)["headrace:event_loop_longest_callback_seconds"])
    assert longest == {"frontend 0": 0, "frontend 1": 0.012}


def test_a_models_name_is_a_label_whatever_is_in_it(board: Board) -> None:
    name = 'org/"ti\\ny"\n'
    sample = families(board, name)["headrace:process_up"].samples[0]
    assert sample.labels["model_name"] == name


def test_every_histogram_shows_its_own_span(board: Board) -> None:
    for span in Span:
        for _ in range(span + 1):
            board.slot("frontend", 1).histogram(span).observe(1_500_000)
    found = families(board)
    shown = {span: found[f"headrace:{name}"].samples for name, _, span in HISTOGRAMS}
    hops = found["headrace:request_hop_seconds"].samples
    for hop in HOPS:
        shown[hop] = [s for s in hops if s.labels["hop"] == hop.name.lower()]
    assert shown.keys() == set(Span)
    for span, samples in shown.items():
        mine = [s for s in samples if s.labels["process"] == "frontend 1"]
        buckets = {s.labels["le"]: s.value for s in mine if "le" in s.labels}
        assert (buckets["0.001"], buckets["0.002"], buckets["+Inf"]) == (0, span + 1, span + 1)
        assert [s.value for s in mine if s.name.endswith("_sum")] == pytest.approx(
            [0.0015 * (span + 1)]
        )
        others = [s.value for s in samples if s.labels["process"] == "frontend 0"]
        assert not any(others)
