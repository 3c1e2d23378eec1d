"""Prometheus itself scrapes `/metrics`, and promtool has nothing to say against it."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import clients
import httpx
import pytest
from servers import RunningServer, wait_until

from support.ports import reserved_port

needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="there is no Debian here")
KEY = "a-key"
TOKENS = 'sum({__name__="headrace:prompt_tokens_total"})'


@pytest.fixture(scope="module")
def programs(ecosystem: Callable[[], AbstractContextManager[None]]) -> Path:
    """The folder with prometheus and promtool."""
    with ecosystem():
        return clients.install_prometheus()


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest, programs: Path) -> Iterator[RunningServer]:
    """A server of either dialect that has answered a request, and wants a key."""
    running = RunningServer("--api-key", KEY, "--metrics-dialect", request.param)
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    told = httpx.post(f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert told.status_code == 200, told.text
    yield running
    assert running.stop() == 0


@needs_apt
def test_promtool_parses_metrics(server: RunningServer, programs: Path) -> None:
    """It exits with 3 where it would have other names, which are not ours to choose."""
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).content
    checked = subprocess.run(
        [programs / "promtool", "check", "metrics"], input=text, capture_output=True
    )
    assert checked.returncode in (0, 3), checked.stderr
    assert b"error while linting" not in checked.stderr, checked.stderr


@needs_apt
def test_prometheus_scrapes_metrics(server: RunningServer, programs: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    scraped = {
        "job_name": "llm",
        "scrape_interval": "1s",
        "static_configs": [{"targets": [server.url.removeprefix("http://")]}],
        "authorization": {"credentials_file": str(key)},
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scraped]}))
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [
                *(programs / "prometheus", "--config.file", tmp_path / "prometheus.yml"),
                *("--storage.tsdb.path", tmp_path / "data", "--web.listen-address", address),
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: value(address, "up") == 1, "the server is up")
            wait_until(lambda: (value(address, TOKENS) or 0) > 0, "tokens are counted")
        finally:
            process.terminate()
            process.wait()


def value(address: str, query: str) -> float | None:
    """Return what a query comes to; None while there is nothing to answer it from."""
    try:
        told: Any = httpx.get(f"http://{address}/api/v1/query", params={"query": query}).json()
    except (httpx.TransportError, json.JSONDecodeError):
        return None
    found = told["data"]["result"]
    return float(found[0]["value"][1]) if found else None
