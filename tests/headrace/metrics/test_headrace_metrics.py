"""What /metrics says is what the board says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from headrace.board.board import MESSAGES_SENT, Board, Seat, State, Timing
from headrace.board.fields import CommonField, EngineField, FrontendField, TokenizerField
from headrace.board.http_counts import HttpCounts
from headrace.config.process_configs import ModelCard
from headrace.metrics.exposition import HistogramFamily, spelled
from headrace.metrics.headrace_metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    HOPS,
    MetricsPage,
    render_metrics,
)
from headrace.system.procfs import PAGE_BYTES, TICK_S, ProcessStats, vitals_of

SEATS = [
    Seat("frontend", 0),
    Seat("frontend", 1),
    Seat("tokenizer", 0),
    Seat("engine", 0),
    Seat("worker", 0),
    Seat("detokenizer", 0),
]


@pytest.fixture
def board() -> Board:
    return Board.create(SEATS)


def card(name: str) -> ModelCard:
    return ModelCard(
        path="",
        name=name,
        max_model_len=300,
        vocab_size=1,
        eos_token_ids=[],
        chat_template=None,
        special_tokens={},
    )


def families(board: Board, model: str = "tiny") -> dict[str, Metric]:
    text = render_metrics(board, [card(model)]).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: Metric) -> dict[str, float]:
    return {sample.labels["process"]: sample.value for sample in family.samples}


def test_every_process_is_up_or_not(board: Board) -> None:
    board.slot("frontend", 1).enter(State.READY)
    up = values(families(board)["headrace:process_up"])
    assert up == {str(seat): float(seat == Seat("frontend", 1)) for seat in SEATS}


def test_every_counter_and_gauge_shows_its_own_field(board: Board) -> None:
    for *_, field in [*COUNTERS, *GAUGES]:
        for slot in board.of(field.role):
            slot[field] = 100 * field + slot.seat.index
    found = families(board)
    for name, _, field in [*COUNTERS, *GAUGES]:
        expected = {str(s.seat): 100.0 * field + s.seat.index for s in board.of(field.role)}
        assert values(found[f"headrace:{name}"]) == expected, name


def test_counters_are_counters_and_gauges_are_gauges(board: Board) -> None:
    found = families(board)
    assert {found[f"headrace:{name}"].type for name, *_ in COUNTERS} == {"counter"}
    assert {found[f"headrace:{name}"].type for name, *_ in GAUGES} == {"gauge"}


def test_cache_usage_is_a_share(board: Board) -> None:
    slot = board.slot("engine")
    assert values(families(board)["headrace:kv_cache_usage_perc"]) == {"engine 0": 0}
    slot[EngineField.PAGES_TOTAL], slot[EngineField.PAGES_FREE] = 8, 6
    assert values(families(board)["headrace:kv_cache_usage_perc"]) == {"engine 0": 0.25}


def test_the_longest_callback_is_in_seconds(board: Board) -> None:
    board.slot("frontend", 1)[FrontendField.LONGEST_CALLBACK_NS] = 12_000_000
    longest = values(families(board)["headrace:event_loop_longest_callback_seconds"])
    assert longest == {"frontend 0": 0, "frontend 1": 0.012}


def test_a_models_name_is_a_label_whatever_is_in_it(board: Board) -> None:
    name = 'org/"ti\\ny"\n'
    sample = families(board, name)["headrace:process_up"].samples[0]
    assert sample.labels["model_name"] == name


SHOWN = [span for span in Timing if span <= Timing.WHOLE]


def test_every_histogram_shows_its_own_span(board: Board) -> None:
    for span in SHOWN:
        for _ in range(span + 1):
            board.slot("frontend", 1).histogram(span).observe(1_500_000)
    found = families(board)
    shown = {span: found[f"headrace:{name}"].samples for name, _, span in HISTOGRAMS}
    timings = found["headrace:request_hop_seconds"].samples
    for hop in HOPS:
        shown[hop] = [s for s in timings if s.labels["hop"] == hop.name.lower()]
    assert shown.keys() == set(SHOWN)
    for span, samples in shown.items():
        mine = [s for s in samples if s.labels["process"] == "frontend 1"]
        buckets = {s.labels["le"]: s.value for s in mine if "le" in s.labels}
        assert (buckets["0.001"], buckets["0.002"], buckets["+Inf"]) == (0, span + 1, span + 1)
        assert [s.value for s in mine if s.name.endswith("_sum")] == pytest.approx(
            [0.0015 * (span + 1)]
        )
        others = [s.value for s in samples if s.labels["process"] == "frontend 0"]
        assert not any(others)


def test_processes_that_serve_several_models_count_each() -> None:
    board = Board.create([*SEATS, Seat("engine", 1)])
    board.slot("engine", 1)[EngineField.MODEL] = 1
    for model in range(2):
        board.slot("tokenizer").of_model(model).add(TokenizerField.PROMPT_TOKENS, 7 + model)
        frontend = board.slot("frontend").of_model(model)
        frontend.histogram(Timing.WHOLE).observe(1_500_000, times=3 + model)
    text = render_metrics(board, [card("one"), card("other")]).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}

    def by_model(name: str, sample: str, process: str) -> dict[str, float]:
        rows = [s for s in found[name].samples if s.name == sample]
        rows = [s for s in rows if s.labels["process"] == process]
        return {s.labels["model_name"]: s.value for s in rows}

    tokens = by_model("headrace:prompt_tokens", "headrace:prompt_tokens_total", "tokenizer 0")
    assert tokens == {"one": 7, "other": 8}
    name = "headrace:e2e_request_latency_seconds"
    assert by_model(name, f"{name}_count", "frontend 0") == {"one": 3, "other": 4}
    of_no_model = [
        ("process_up", "process_up", "frontend 0"),
        ("http_requests", "http_requests_total", "frontend 0"),
        ("tokenizer_requests", "tokenizer_requests_total", "tokenizer 0"),
    ]
    for family, sample, process in of_no_model:
        assert by_model(f"headrace:{family}", f"headrace:{sample}", process).keys() == {""}


def test_what_is_on_its_way_is_what_was_sent_and_not_handled(board: Board) -> None:
    board.slot("frontend", 0)[FrontendField.FORWARDED_BYTES] = 30
    board.slot("frontend", 1)[FrontendField.FORWARDED_BYTES] = 20
    board.slot("tokenizer")[TokenizerField.HANDLED_BYTES] = 45
    board.slot("tokenizer")[MESSAGES_SENT + 1] = 5
    board.slot("detokenizer")[MESSAGES_SENT + 1] = 7
    board.slot("frontend", 1)[FrontendField.MESSAGES_TAKEN] = 11
    found = families(board)
    assert values(found["headrace:tokenizer_queue_bytes"]) == {"tokenizer 0": 5}
    queue = values(found["headrace:frontend_queue_messages"])
    assert queue == {"frontend 0": 0, "frontend 1": 1}


def test_live_processes_report_cpu_time_and_memory(board: Board) -> None:
    board.slot("engine").enter(State.READY)  # this very process
    board.slot("worker").enter(State.READY)
    board.slot("worker")[CommonField.STATE] = State.DEAD
    found = families(board)
    cpu = values(found["headrace:process_cpu_seconds"])
    assert cpu.keys() == {"engine 0"}
    assert cpu["engine 0"] >= values(found["headrace:process_busy_seconds"])["engine 0"] > 0
    assert values(found["headrace:process_resident_memory_bytes"])["engine 0"] > 1 << 20


def test_a_name_with_spaces_and_brackets_is_no_obstacle(tmp_path: Path) -> None:
    stat = "7 (a) b (c) S " + " ".join(str(n) for n in range(4, 30))
    (tmp_path / "7/task/7").mkdir(parents=True)
    for path in ("7/stat", "7/task/7/stat"):
        (tmp_path / path).write_text(stat)
    vitals = vitals_of(7, tmp_path)
    assert vitals == ProcessStats((14 + 15) * TICK_S, (14 + 15) * TICK_S, 24 * PAGE_BYTES)
    assert vitals_of(8, tmp_path) is None


def expanded(family: HistogramFamily) -> Metric:
    """Return the family as `prometheus_client` has it."""
    known = HistogramMetricFamily(family.name, family.documentation, labels=family.labels)
    for values, spread, bounds in family.rows:
        names = (*map(spelled, bounds), "+Inf")
        counts = (*spread.at_most(bounds), spread.count)
        known.add_metric(values, list(zip(names, counts, strict=True)), spread.sum)
    return known


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_text_is_as_prometheus_client_writes_it(board: Board, dialect: str) -> None:
    row = HttpCounts(board.slot("frontend", 1).http_words).row("POST", "/v1/embeddings")
    row.begin()
    row.end(200, 3_000_000, 10, 20)
    page = MetricsPage(board, [card('a"b\\c%d')], dialect)

    class Expanded(Collector):
        """The families of the page, with a sample for each bucket."""

        def collect(self) -> Iterator[Metric]:
            for family in page.collect():
                yield expanded(family) if isinstance(family, HistogramFamily) else family

    def lasting(text: bytes) -> list[bytes]:
        return [line for line in text.splitlines() if b"process_" not in line]

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Expanded())
    assert lasting(page.render()) == lasting(generate_latest(registry))
