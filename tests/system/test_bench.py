"""`headrace bench` against the mock engine."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import PATIENCE_S, RunningServer

HEADRACE = Path(sys.executable).parent / "headrace"


@pytest.fixture(scope="module")
def mock() -> Iterator[RunningServer]:
    running = RunningServer("--engine", "mock", "--mock-profile", "2ms")
    yield running
    assert running.stop() == 0


def bench(server: RunningServer, *args: str) -> str:
    command = [str(HEADRACE), "bench", *args, "--base-url", server.url, "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def saved(server: RunningServer, folder: Path, *args: str) -> dict[str, Any]:
    where = ("--save-result", "--result-dir", str(folder), "--result-filename", "result.json")
    bench(server, *args, *where)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_serve_finds_every_figure(mock: RunningServer, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    result = saved(
        *(mock, tmp_path, "serve", "--num-prompts", "40", "--request-rate", "200"),
        *("--client-procs", "2", "--random-input-len", "60", "--random-output-len", "128"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *("--goodput", "e2el:60000", "--save-detailed", "--plot", str(plot)),
    )
    assert (result["completed"], result["failed"], result["errors"]) == (40, 0, [])
    assert result["total_output_tokens"] == 40 * 128 == sum(result["output_lens"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for name in ("mean", "median", "std", "p50", "p90", "p99"):
            assert result[f"{name}_{metric}_ms"] >= 0
    assert result["request_goodput"] == result["request_throughput"] > 0
    # A step takes 2 ms; who reads late may find many tokens at once.
    assert result["mean_e2el_ms"] > 127 * 1.9
    steps_ms = 127 * result["mean_tpot_ms"]
    assert result["mean_ttft_ms"] + steps_ms == pytest.approx(result["mean_e2el_ms"])
    assert len(result["client_busy"]) == 2
    # 60 tokens were asked for; the chat template's are always the same.
    assert max(result["input_lens"]) - min(result["input_lens"]) <= 6
    svg = plot.read_text()
    assert svg.startswith("<svg")
    assert svg.count("<polyline") == 6


def test_serve_takes_files_and_other_routes(mock: RunningServer, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "How are you? " * 8}, {"from": "gpt", "value": "x " * 40}]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([{"conversations": turns}] * 5))
    output = bench(
        *(mock, "serve", "--backend", "openai", "--dataset-name", "sharegpt"),
        *("--dataset-path", str(file), "--num-prompts", "8", "--max-concurrency", "4"),
    )
    assert re.search(r"^Successful requests: +8$", output, re.MULTILINE)
    assert re.search(r"^Peak concurrent requests: +[1-4]$", output, re.MULTILINE)


def test_fields_of_requests_are_an_object(mock: RunningServer) -> None:
    for text in ("[1]", "{x"):
        command = [str(HEADRACE), "bench", "serve", "--base-url", mock.url, "--extra-body", text]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 2
        assert "argument --extra-body: invalid json_object value" in done.stderr


def test_who_reads_a_part_of_the_table_is_not_bothered(mock: RunningServer) -> None:
    command = [str(HEADRACE), "bench", "serve", "--base-url", mock.url, "--num-prompts", "1"]
    done = subprocess.Popen(
        [*command, "--disable-tqdm"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert done.stdout is not None
    done.stdout.close()
    assert done.communicate(timeout=PATIENCE_S)[1] == b""
    assert done.returncode == 128 + signal.SIGPIPE


def test_stream_tells_where_the_time_goes(mock: RunningServer, tmp_path: Path) -> None:
    result = saved(
        *(mock, tmp_path, "stream", "--num-prompts", "10", "--request-rate", "100"),
        *("--random-input-len", "20", "--random-output-len", "8"),
    )
    rows = result["rows"]
    assert (result["completed"], result["failed"]) == (10, 0)
    for name in ("submit lag", "TTFT", "TPOT", "ITL", "latency", "throughput of a stream"):
        assert rows[name]["p50"] <= rows[name]["p95"] <= rows[name]["p99"]
    assert rows["TTFT"]["p50"] >= 2


def test_what_cannot_work_is_one_line(mock: RunningServer) -> None:
    for args, why in (
        (("--goodput", "speed:3"), "the metric must be one of ttft, tpot, e2el"),
        (("--request-rate", "0"), "--request-rate 0.0 must be more than 0"),
        (("--base-url", "http://127.0.0.1:1"), "cannot be reached"),
        (("--num-warmups", "-1"), "--num-warmups -1 must be at least 0"),
        (("--random-prefix-len", "-1"), "--random-prefix-len -1 must be at least 0"),
        (("--goodput", "ttft:-1"), "the limit must be more than 0"),
        (("--endpoint", "v1/completions"), "--endpoint v1/completions must begin with /"),
        (("--plot", "plot.gif"), "must end in .svg or .html or .png"),
        (("--plot", "/proc/none/plot.png"), "--plot: /proc/none cannot be made"),
        (("--save-result", "--result-dir", "/proc/none"), "--result-dir: /proc/none cannot be"),
    ):
        command = [str(HEADRACE), "bench", "serve", "--base-url", mock.url, *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert why in line
