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

from headrace.cli import main

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
    # A step takes 2 ms; a client that reads late may find many tokens at once.
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


def test_reader_of_a_part_of_the_table_sees_no_traceback(mock: RunningServer) -> None:
    command = [str(HEADRACE), "bench", "serve", "--base-url", mock.url, "--num-prompts", "1"]
    done = subprocess.Popen(
        [*command, "--disable-tqdm"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert done.stdout is not None
    done.stdout.close()
    assert done.communicate(timeout=PATIENCE_S)[1] == b""
    assert done.returncode == 128 + signal.SIGPIPE


def test_stream_reports_its_times(mock: RunningServer, tmp_path: Path) -> None:
    result = saved(
        *(mock, tmp_path, "stream", "--num-prompts", "10", "--request-rate", "100"),
        *("--random-input-len", "20", "--random-output-len", "8"),
    )
    rows = result["rows"]
    assert (result["completed"], result["failed"]) == (10, 0)
    for name in ("submit lag", "TTFT", "TPOT", "ITL", "latency", "throughput of a stream"):
        assert rows[name]["p50"] <= rows[name]["p95"] <= rows[name]["p99"]
    assert rows["TTFT"]["p50"] >= 2


def test_stream_of_token_ids_is_run_again_and_again(mock: RunningServer, tmp_path: Path) -> None:
    result = saved(
        *(mock, tmp_path, "stream", "--num-prompts", "4", "--pretok", "--repeat-runs", "3"),
        *("--submit-interval-ms", "5", "--input-len", "20", "--output-len", "8"),
    )
    assert (result["completed"], result["failed"], len(result["runs"])) == (12, 0, 3)
    for row in result["rows"].values():
        least, most = row["p50 from least to most"]
        assert least <= row["p50"] <= most


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--repeat-runs", "0"], "--repeat-runs 0 must be at least 1"),
        (["--submit-interval-ms", "-1"], "--submit-interval-ms -1.0 must be at least 0"),
        (["--submit-interval-ms", "1", "--request-rate", "2"], "takes the place of --request-rate"),
        (["--pretok", "--dataset-name", "random-mm"], "no room for images"),
    ],
)
def test_stream_refuses_what_cannot_work(flags: list[str], why: str) -> None:
    done = subprocess.run(
        [str(HEADRACE), "bench", "stream", *flags], capture_output=True, text=True
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert why in line


def bench_engine(*args: str) -> str:
    command = [str(HEADRACE), "bench", *args, "--engine", "mock", "--mock-profile", "2ms"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stderr
    return done.stdout


def test_latency_has_the_figures_and_keys_of_vllm(tmp_path: Path) -> None:
    file, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    output = bench_engine(
        *("latency", "--input-len", "4", "--output-len", "5", "--batch-size", "2"),
        *("--num-iters-warmup", "1", "--num-iters", "3"),
        *("--output-json", str(file), "--plot", str(plot)),
    )
    result = json.loads(file.read_text())
    assert result.keys() == {"avg_latency", "latencies", "percentiles"}
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert len(result["latencies"]) == 3
    assert min(result["latencies"]) > 5 * 0.0019  # a step takes 2 ms
    assert output.splitlines()[0] == f"Avg latency: {result['avg_latency']} seconds"
    assert output.splitlines()[-1].startswith("99% percentile latency: ")
    assert plot.read_text().count("<polyline") == 2


def test_throughput_has_the_figures_and_keys_of_vllm(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    output = bench_engine(
        *("throughput", "--input-len", "4", "--output-len", "5", "--num-prompts", "6", "--n", "2"),
        *("--output-json", str(file)),
    )
    result = json.loads(file.read_text())
    theirs = {"elapsed_time", "num_requests", "total_num_tokens"}
    assert theirs | {"requests_per_second", "tokens_per_second"} <= result.keys()
    assert (result["num_requests"], result["total_num_tokens"]) == (6, 6 * (4 + 2 * 5))
    assert output.splitlines()[1:] == [
        "Total num prompt tokens:  24",
        "Total num output tokens:  60",
    ]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["latency", "--input-len", "0"], "--input-len 0 must be at least 1"),
        (["latency", "--plot", "plot.gif"], "must end in .svg or .html or .png"),
        (["throughput", "--random-range-ratio", "1"], "must be from 0 to 1"),
        (["throughput", "--output-json", "/proc/none/x"], "/proc/none cannot be made"),
        (["throughput", "--nonsense"], "--nonsense is not known"),
    ],
)
def test_engine_benchmark_refuses_what_cannot_work(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refusal(capsys, *flags)


def test_engine_benchmark_ends_where_there_is_no_model() -> None:
    command = [str(HEADRACE), "bench", "throughput", "/no/such"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "/no/such: no such file or folder" in line


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the one line with which a benchmark ends in this process."""
    with pytest.raises(SystemExit) as ended:
        main.run("bench", *args)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_cannot_work_is_one_line(
    mock: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
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
        assert why in refusal(capsys, "serve", "--base-url", mock.url, *args)
