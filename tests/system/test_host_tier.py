"""`--device cuda` with a host tier answers as a server on the CPU. Without a GPU it is interpreted.

HOST_TIER_TP is the number of workers, HOST_TIER_KILLS names processes that are killed in turn.
"""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family_table
import httpx
import pytest
from mutants.mutants import interpreted, mutants
from servers import RunningServer, wait_until
from tiny_models import make_byte_folder

from headrace.system.machine import has_gpus

NUM_PROMPTS = 2
PAGE_TOKENS, PROMPT_PAGES = 32, 2
CACHED = PROMPT_PAGES * PAGE_TOKENS
# For one sequence, whose only KV head each worker has; the host has room for more.
PAGE_BYTES = 2 * PAGE_TOKENS * 16 * 4
STATES_BYTES = 7 * 2 * 32 * 4  # of as many slots as there are then
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "lfm2": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}
WITH_STATES = ("lfm2",)
FLAGS = ("--dtype", "float32", "--kv-cache-dtype", "float32", "--max-model-len", "96")
SMALL = ("--max-num-seqs", "2", "--max-num-batched-tokens", "40", "--enforce-eager")
TP = int(os.environ.get("HOST_TIER_TP", "1"))
ON_KERNELS = ("--device", "cuda", "--tp", str(TP))
KILLS = os.environ.get("HOST_TIER_KILLS", "worker 0").split(",")
ENV = mutants("engine=steady") if has_gpus() else interpreted("engine=steady")
TIMEOUT_S = 300


@pytest.fixture(scope="module", params=MODELS if family_table.WRITES else ["llama"])
def model_type(request: pytest.FixtureRequest) -> str:
    """`make families` has a model with states, too."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(model_type: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_byte_folder(folder, model_type, **MODELS[model_type])
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[list[str]]:
    """The answers of the CPU's own code."""
    server = RunningServer(str(folder), "--device", "cpu", *FLAGS)
    yield [ask(server, prompt)[0] for prompt in range(NUM_PROMPTS)]
    assert server.stop() == 0


def ask(server: RunningServer, prompt: int) -> tuple[str, int]:
    """Return an answer to a prompt of some pages, and how many of its tokens were cached."""
    text = "".join(random.Random(prompt).choices("abcdefgh", k=CACHED + 3))
    body = {"prompt": text, "max_tokens": 3, "temperature": prompt % 2, "seed": prompt}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
    usage = reply["usage"]["prompt_tokens_details"]
    return reply["choices"][0]["text"], usage["cached_tokens"]


def answers(server: RunningServer) -> list[tuple[str, int]]:
    """Return the answers to all prompts, with their cached tokens."""
    return [ask(server, prompt) for prompt in range(NUM_PROMPTS)]


def test_answers_stay_with_pages_of_the_host(
    model_type: str, folder: Path, tmp_path: Path, expected: list[str]
) -> None:
    store = ("--kv-store", str(tmp_path), "--kv-store-disk-bytes", "1000000")
    num_states = NUM_PROMPTS * (model_type in WITH_STATES)  # one behind each prompt
    room = 3 * PAGE_BYTES + (STATES_BYTES if num_states else 0)
    sizes = ("--kv-cache-memory-bytes", str(room * TP))
    flags = (*ON_KERNELS, *FLAGS, *SMALL, *sizes, "--kv-store-bytes", "1000000", *store)
    cold, warm = ([(text, cached) for text in expected] for cached in (0, CACHED))
    server = RunningServer(str(folder), *flags, env=ENV)
    try:
        assert answers(server) == cold
        num_pages = NUM_PROMPTS * PROMPT_PAGES
        num_records = num_pages + num_states
        wait_until(lambda: server.metric("kv_store_copied_out_total") == num_records, "copies")
        assert answers(server) == warm, "the host's: the GPU has room for one"
        assert server.metric("kv_store_hits_total") >= num_pages - PROMPT_PAGES
        for title in KILLS:
            server.ring[f"headrace: {title}"].kill()
            assert answers(server) == warm
        assert server.metric("kv_pages_recovered_total") >= num_pages
        wait_until(lambda: server.metric("kv_store_stored_total") == num_records, "all on disk")
        server.process.send_signal(signal.SIGKILL)
        server.wait()
        server = RunningServer(str(folder), *flags, env=ENV)
        assert answers(server) == warm, "the disk's"
    finally:
        server.close()
