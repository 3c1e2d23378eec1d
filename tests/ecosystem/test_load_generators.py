"""Load generators ask for what they ask of any server, and report that all of it succeeded."""

import json
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import clients
import pytest
from servers import RunningServer

NUM_REQUESTS = 6
CONCURRENCY = 2
INPUT_TOKENS, OUTPUT_TOKENS = 32, 8
TIMEOUT_S = 1200
VLLM = clients.ECOSYSTEM / "drivers" / "vllm_driver.py"
VLLM_ROUTES = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
}
Served = tuple[str, RunningServer]
Run = Callable[..., None]


@pytest.fixture
def run(ecosystem: Callable[[], AbstractContextManager[None]], tmp_path: Path) -> Run:
    """A function that runs a command of an environment, which is installed first."""

    def run_command(environment: str, *arguments: str) -> None:
        with ecosystem():
            folder = clients.install(environment)
        program = [str(folder / "bin" / environment)]
        if environment == "vllm":
            program = [str(folder / "bin" / "python"), str(VLLM)]
        command = [*program, *arguments]
        own = clients.own_environ(HF_HOME=str(tmp_path / "hub"))
        ran = subprocess.run(
            command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr

    return run_command


@pytest.mark.parametrize("kind", ["chat", "completions", "responses", "messages"])
def test_aiperf_reports_no_errors(
    served: Served, run: Run, tokenizer: Path, tmp_path: Path, kind: str
) -> None:
    model, server = served
    run(
        *("aiperf", "profile", "--model", model, "--url", server.url, "--ui", "none"),
        *("--endpoint-type", kind, "--streaming", "--tokenizer", str(tokenizer)),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", str(CONCURRENCY)),
        *("--isl", str(INPUT_TOKENS), "--osl", str(OUTPUT_TOKENS), "--artifact-dir", "told"),
        *(("--use-server-token-count", "--per-chunk-usage") if kind == "chat" else ()),
    )
    told = json.loads((tmp_path / "told" / "profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == NUM_REQUESTS
    assert told.get("error_request_count", {"avg": 0})["avg"] == 0
    assert told["time_to_first_token"]["count"] == NUM_REQUESTS


def test_guidellm_reports_no_errors(
    served: Served, run: Run, tokenizer: Path, tmp_path: Path
) -> None:
    model, server = served
    run(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={server.url},model={model}"),
        *("--profile", f"kind=concurrent,streams={CONCURRENCY}", "--disable-console-interactive"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}", "--output", "kind=json,path=told.json"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
    )
    (benchmark,) = json.loads((tmp_path / "told.json").read_text())["benchmarks"]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)


@pytest.mark.parametrize("backend", VLLM_ROUTES)
def test_vllm_bench_serve_reports_no_errors(
    served: Served, run: Run, tokenizer: Path, tmp_path: Path, backend: str
) -> None:
    model, server = served
    run(
        *("vllm", "--backend", backend, "--base-url", server.url, "--model", model),
        *("--endpoint", VLLM_ROUTES[backend], "--tokenizer", str(tokenizer)),
        *("--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS)),
        *("--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(NUM_REQUESTS)),
        *("--max-concurrency", str(CONCURRENCY), "--save-result", "--result-filename", "told.json"),
    )
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["completed"], told["failed"]) == (NUM_REQUESTS, 0)
    assert told["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS
    assert told["mean_ttft_ms"] > 0
