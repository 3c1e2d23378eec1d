"""The definitions of the figures, on times that are made up."""

import json
from array import array
from typing import Any

import numpy as np
import pytest

from headrace.bench.connection import Record
from headrace.bench.figures import RequestTimes, Settings, compute, max_open, per_second, table
from headrace.bench.load import LoadResult


def record(sent: float, *came: float, tokens: int = 0, error: str = "") -> Record:
    """Make the record of a stream whose pieces came at these times."""
    gaps = array("f", np.diff(came)).tobytes()
    return Record(
        index=0,
        due=sent,
        sent=sent,
        first=came[0] if came else 0.0,
        last=came[-1] if came else 0.0,
        gaps=gaps,
        prompt_tokens=10,
        output_tokens=tokens or len(came),
        error=error,
    )


def settings(**changes: Any) -> Settings:
    fields: dict[str, Any] = {
        "request_rate": float("inf"),
        "burstiness": 1.0,
        "max_concurrency": None,
        "metrics": ["ttft", "tpot", "itl", "e2el"],
        "percentiles": [50.0, 99.0],
        "promises": {},
    }
    return Settings(**(fields | changes))


def test_times_are_those_of_vllm() -> None:
    times = RequestTimes.of([record(1.0, 1.1, 1.3, 1.4), record(2.0, 2.5)])
    assert times.ttft == pytest.approx([100, 500])
    assert times.e2el == pytest.approx([400, 500])
    assert times.itl == pytest.approx([200, 100], rel=1e-4)
    assert times.tpot[0] == pytest.approx(150)
    assert np.isnan(times.tpot[1])  # one token has no time per further token


def test_tpot_counts_tokens_and_itl_pieces() -> None:
    times = RequestTimes.of([record(0.0, 0.1, 0.5, tokens=9)])
    assert times.tpot == pytest.approx([400 / 8])
    assert times.itl == pytest.approx([400], rel=1e-4)


def test_failures_count_and_nothing_else_of_them() -> None:
    bad = record(0.0, error="status 500")
    result = compute(LoadResult(0.0, [record(0.0, 1.0, 2.0), bad], [0.5]), settings())
    assert (result["completed"], result["failed"], result["errors"]) == (1, 1, ["status 500"])
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (10, 2)
    assert result["duration"] == pytest.approx(2.0)
    assert result["output_throughput"] == pytest.approx(1.0)
    assert result["total_token_throughput"] == pytest.approx(6.0)
    assert result["mean_ttft_ms"] == pytest.approx(1000)


def test_goodput_is_of_requests_that_kept_every_promise() -> None:
    records = [
        record(0.0, 0.1, 0.2),
        record(0.0, 0.1, 1.1),  # the second token is late
        record(0.0, 0.9, 1.0),  # the first is
        record(0.0, 0.1),  # and where there is one only, it is in time
    ]
    promises = {"ttft": 200.0, "tpot": 500.0}
    result = compute(LoadResult(0.0, records, [0.1]), settings(promises=promises))
    assert result["request_goodput"] * result["duration"] == pytest.approx(2)


def test_peaks() -> None:
    records = [record(0.0, 0.5, 0.6, 1.2), record(0.2, 0.7), record(1.5, 2.5)]
    tokens, concurrency = per_second(records, 0.0)
    assert tokens == pytest.approx([3, 1, 1])
    assert concurrency == pytest.approx([2, 2, 1])
    assert max_open(records) == 2


def test_a_result_has_every_figure_and_is_json() -> None:
    result = compute(LoadResult(0.0, [record(0.0, 1.0, 2.0)], [0.2]), settings())
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for name in ("mean", "median", "std", "p50", "p99"):
            assert f"{name}_{metric}_ms" in result
    assert json.loads(json.dumps(result)) == result
    assert result["request_rate"] == "inf"


def test_nothing_is_no_division_by_zero() -> None:
    result = compute(LoadResult(0.0, [], [0.0]), settings(promises={"ttft": 1.0}))
    assert (result["completed"], result["mean_ttft_ms"], result["request_goodput"]) == (0, 0, 0)
    assert "Successful requests:" in table(result, settings())


def test_a_client_that_was_too_busy_says_so() -> None:
    for busy, said in ((0.95, True), (0.5, False)):
        result = compute(LoadResult(0.0, [record(0.0, 1.0)], [0.1, busy]), settings())
        assert result["client_bound"] is said
        assert ("was the bottleneck" in table(result, settings())) is said


def test_the_table_has_the_form_people_know() -> None:
    lines = table(
        compute(LoadResult(0.0, [record(0.0, 1.0, 2.0)], [0.2]), settings(request_rate=5.0)),
        settings(request_rate=5.0, metrics=["ttft"]),
    ).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     1"
    assert "Request rate configured (RPS):           5.00" in lines
    assert "---------------Time to First Token----------------" in lines
