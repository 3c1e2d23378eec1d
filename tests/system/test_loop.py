"""No work on the event loop: what a soak leaves on the clock of its callbacks."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
from servers import RunningServer

HEADRACE = Path(sys.executable).parent / "headrace"
JSON = {"Content-Type": "application/json"}
# Processor time, which a busy machine stretches less. A body of 4 MB is read and handed on in 2 ms,
# a step of 64 streams in less. Parsing the one or rendering the other would take far longer.
MAX_CALLBACK_S = 0.03


def test_no_callback_of_a_frontend_takes_long() -> None:
    server = RunningServer("--engine", "mock", "--max-num-seqs", "64")
    try:
        command = [str(HEADRACE), "bench", "serve", "--base-url", server.url, "--disable-tqdm"]
        load = ("--num-prompts", "600", "--max-concurrency", "64", "--random-output-len", "64")
        done = subprocess.Popen([*command, *load], stdout=subprocess.DEVNULL)
        long = json.dumps({"prompt": "word " * 800_000, "max_tokens": 1}).encode()
        while done.poll() is None:
            refused = httpx.post(f"{server.url}/v1/completions", content=long, headers=JSON)
            assert refused.status_code == 400
            assert "context length" in refused.json()["error"]["message"]
        assert done.returncode == 0
        # A quiet loop has ten timers a second.
        assert server.metric("event_loop_lag_seconds_count") > 10
        assert 0 < server.metric("event_loop_longest_callback_seconds") < MAX_CALLBACK_S
    finally:
        assert server.stop() == 0
