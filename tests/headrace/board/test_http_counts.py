"""What a frontend counts of HTTP is what instrumented servers would tell."""

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace.board.board import HISTOGRAMS, IDS, Board, Seat, Timing
from headrace.board.histogram import HISTOGRAM_WORDS
from headrace.board.http_counts import CLIENT_LEFT, NOT_COUNTED, STATUSES, HttpCounts
from headrace.config.process_configs import ModelCard
from headrace.metrics.headrace_metrics import render_metrics

CARD = ModelCard(
    path="",
    name="org/tiny",
    max_model_len=300,
    vocab_size=1,
    eos_token_ids=[],
    chat_template=None,
    special_tokens={},
)
MS = 10**6
CHAT, POST, GET = "/v1/chat/completions", "POST", "GET"
# As metrics.default() of prometheus-fastapi-instrumentator 8 has them, as text.
BOUNDS = (
    "0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1.0 1.5 2.0 2.5 3.0 3.5 4.0 4.5 5.0 7.5 10.0 30.0 "
    "60.0 +Inf"
)


@pytest.fixture
def board() -> Board:
    return Board.create([Seat("frontend", 0), Seat("frontend", 1), Seat("engine", 0)])


def counts(board: Board, frontend: int = 0) -> HttpCounts:
    return HttpCounts(board.slot("frontend", frontend).http_words)


def answer(counts: HttpCounts, method: str, path: str, status: int, ms: int = 1) -> None:
    """Count a request of 30 bytes and its answer of 7."""
    row = counts.row(method, path)
    row.begin()
    row.end(status, ms * MS, 30, 7)


def families(board: Board, dialect: str = "vllm") -> dict[str, Metric]:
    text = render_metrics(board, [CARD], dialect).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the samples by some labels, in that order, and the end of their name."""
    return {
        (*(s.labels[label] for label in labels), s.name.removeprefix(family.name)): s.value
        for s in family.samples
    }


def test_requests_are_counted_by_method_status_and_handler(board: Board) -> None:
    for frontend in range(2):
        answer(counts(board, frontend), POST, CHAT, 200)
    answer(counts(board), POST, CHAT, 401)
    answer(counts(board), POST, CHAT, 429)
    answer(counts(board), POST, "/tokenize", 503)
    answer(counts(board), "PUT", CHAT, 405)
    answer(counts(board), "BREW", "/coffee", 404)
    assert values(families(board)["http_requests"], "method", "status", "handler") == {
        (POST, "2xx", CHAT, "_total"): 2,
        (POST, "4xx", CHAT, "_total"): 2,
        (POST, "5xx", "/tokenize", "_total"): 1,
        ("PUT", "4xx", "none", "_total"): 1,
        ("OTHER", "4xx", "none", "_total"): 1,
    }


def test_what_monitors_ask_for_is_not_counted(board: Board) -> None:
    for method, path in NOT_COUNTED:
        answer(counts(board), method, path, 200)
    assert not families(board)["http_requests"].samples
    assert not families(board, "sglang")["sglang:http_requests"].samples


def test_durations_have_the_instrumentators_buckets(board: Board) -> None:
    answer(counts(board), POST, CHAT, 200, ms=200)
    answer(counts(board, 1), POST, CHAT, 200, ms=8000)
    answer(counts(board), POST, "/tokenize", 200, ms=20)
    found = families(board)
    fine = found["http_request_duration_highr_seconds"].samples
    assert " ".join(s.labels["le"] for s in fine if "le" in s.labels) == BOUNDS
    up_to = {s.labels["le"]: s.value for s in fine if "le" in s.labels}
    assert (up_to["0.01"], up_to["0.025"], up_to["0.25"], up_to["10.0"]) == (0, 1, 2, 3)
    assert [s.value for s in fine if s.name.endswith("_sum")] == pytest.approx([8.22])
    coarse = found["http_request_duration_seconds"].samples
    chat = {
        s.labels["le"]: s.value for s in coarse if s.labels["handler"] == CHAT if "le" in s.labels
    }
    assert chat == {"0.1": 0, "0.5": 1, "1.0": 1, "+Inf": 2}
    assert {s.labels["method"] for s in coarse} == {POST}


def test_bodies_are_counted_by_their_declared_length(board: Board) -> None:
    answer(counts(board), POST, CHAT, 200)
    answer(counts(board, 1), POST, CHAT, 400)
    answer(counts(board), "PUT", "/", 404)
    found = families(board)
    received = values(found["http_request_size_bytes"], "handler")
    assert received[CHAT, "_count"], received[CHAT, "_sum"] == (2, 60)
    sent = found["http_response_size_bytes"]
    assert sent.type == "summary"
    assert values(sent, "handler")["none", "_sum"] == 7


def test_sglang_reports_every_status_and_open_requests(board: Board) -> None:
    answer(counts(board), POST, CHAT, 200)
    answer(counts(board), POST, CHAT, 401)
    answer(counts(board), POST, CHAT, CLIENT_LEFT)
    counts(board, 1).row(POST, CHAT).begin()
    found = families(board, "sglang")
    assert values(found["sglang:http_requests"], "endpoint", "method") == {
        (CHAT, POST, "_total"): 4
    }
    assert values(found["sglang:http_requests_active"], "endpoint", "method") == {
        (CHAT, POST, ""): 1
    }
    assert values(found["sglang:http_responses"], "endpoint", "status_code", "method") == {
        (CHAT, str(status), POST, "_total"): 1 for status in (200, 401, CLIENT_LEFT)
    }


def test_what_a_frontend_that_died_had_open_has_failed(board: Board) -> None:
    answer(counts(board), POST, CHAT, 200)
    counts(board).row(POST, CHAT).begin()
    counts(board).settle()
    counts(board).settle()
    row = counts(board).row(POST, CHAT)
    assert {status: n for status, n in row.responses.items() if n} == {200: 1, 500: 1}


def test_rows_and_histograms_fit_their_slot(board: Board) -> None:
    assert HISTOGRAMS + len(Timing) * HISTOGRAM_WORDS <= IDS
    mine, other = counts(board), counts(board, 1)
    for _, row in mine:
        for status in STATUSES:
            row.begin()
            row.end(status, 90_000 * MS, 1, 1)
    assert [row.num_begun for _, row in mine] == [len(STATUSES) for _ in mine]
    assert {row.responses[status] for _, row in mine for status in STATUSES} == {1}
    assert not any(row.num_begun for _, row in other)
