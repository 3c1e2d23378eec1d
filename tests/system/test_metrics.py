"""A served request shows in /metrics as vLLM would show it, and a Prometheus server can read it."""

import json
import re
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import PATIENCE_S, RunningServer, wait_until

from support.ports import reserved_port

PROMETHEUS = shutil.which("prometheus")  # Debian's package
COUNTS = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_params_n",
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
)


def samples(server: RunningServer) -> dict[str, float]:
    """Return vLLM's samples by name and, where there are such, further labels."""
    text = server.metrics()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
            found[" ".join([sample.name.removeprefix("vllm:"), *labels])] = sample.value
    return found


def test_a_request_is_counted_where_vllm_counts_it(server: RunningServer) -> None:
    server.settle()
    before = samples(server)
    body = {"prompt": "One, two,", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    done = httpx.post(f"{server.url}/v1/completions", json=body)
    answer = done.json()

    def grown() -> dict[str, float]:
        return {name: value - before.get(name, 0) for name, value in samples(server).items()}

    # A step is counted while the next one is computed, or when there is none.
    wait_until(lambda: grown()["request_success_total length"] == 1, "the request is counted")
    server.settle()  # and by the frontend, which writes first
    news = grown()
    for name in COUNTS:
        assert news[f"{name}_count"] == 1, name
    assert news["generation_tokens_total"] == 6
    assert news["prompt_tokens_total"] == answer["usage"]["prompt_tokens"]
    assert news["inter_token_latency_seconds_count"] == 5
    path = "/v1/completions"
    assert news[f"http_requests_total {path} POST 2xx"] == 1
    assert news[f"http_request_duration_seconds_count {path} POST"] == 1
    assert news[f"http_response_size_bytes_sum {path}"] == len(done.content)
    assert news["request_generation_tokens_sum"] == 6
    parts = ("prefill", "decode", "queue")
    total = sum(news[f"request_{part}_time_seconds_sum"] for part in parts)
    assert 0 < total <= news["e2e_request_latency_seconds_sum"]
    assert news["iteration_tokens_total_sum"] == answer["usage"]["prompt_tokens"] + 5


def test_prefix_hit_rate_is_what_requests_share(server: RunningServer) -> None:
    server.settle()
    before = samples(server)
    text = server.metrics()
    info = re.search(r'^vllm:cache_config_info{.*block_size="(\d+)"', text, re.MULTILINE)
    assert info is not None
    page = int(info[1])
    prompt = [20000 + token for token in range(4 * page)]  # as in no other request
    branch = [*prompt[: 2 * page + 1], *prompt[:page]]
    # Whole pages are found, and one token is always left to compute.
    cases = [(prompt, 0), (prompt, 3), (branch, 2), ([*branch, 1], 3), (prompt[:page], 0)]
    for ids, _ in cases:
        body = {"prompt": ids, "max_tokens": 2, "temperature": 0}
        httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status()
    server.settle()
    after = samples(server)
    names = ("prefix_cache_hits_total", "prefix_cache_queries_total")
    hits, queries = (after[name] - before[name] for name in names)
    num_found = sum(num_pages * page for _, num_pages in cases)
    assert hits / queries == num_found / sum(len(ids) for ids, _ in cases)


@pytest.mark.skipif(PROMETHEUS is None, reason="Debian's prometheus is not installed")
def test_prometheus_scrapes_it(server: RunningServer, tmp_path: Path) -> None:
    assert PROMETHEUS is not None
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": "llm", "static_configs": [{"targets": [urlsplit(server.url).netloc]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    ports = ExitStack()
    port = ports.enter_context(reserved_port())
    command = [PROMETHEUS, f"--config.file={tmp_path}/prometheus.yml"]
    command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"]
    scraper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def value(query: str) -> float | None:
        try:
            url = f"http://127.0.0.1:{port}/api/v1/query"
            result = httpx.get(url, params={"query": query}).json()["data"]["result"]
        except (httpx.HTTPError, KeyError, json.JSONDecodeError):
            return None
        return float(result[0]["value"][1]) if result else None

    try:
        wait_until(lambda: value('up{job="llm"}') == 1, "a scrape that succeeds")
        wait_until(lambda: value("vllm:num_requests_running") == 0, "a metric")
        num_up = len(server.ring) - 1  # all but the supervisor
        wait_until(lambda: value("sum(headrace:process_up)") == num_up, "all are up")
    finally:
        scraper.terminate()
        scraper.wait(PATIENCE_S)
        ports.close()
