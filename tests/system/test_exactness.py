"""Greedy text is what `transformers` says, however the engine cuts, shares, preempts or guesses."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from reference import NUM_TOKENS, Expected
from servers import RunningServer

TIMEOUT_S = 120
EXACT = ("--kv-cache-dtype", "float32")
TOKEN_BYTES = 2 * 4 * 30 * 3 * 64  # SmolLM2-135M's keys and values in fp32
ROUNDS = 2  # so that every prompt is known when it comes again

SETTINGS = {
    "cut small, odd": ("--max-num-batched-tokens", "13", "--max-num-seqs", "11"),
    "nothing shared": ("--no-enable-prefix-caching",),
    "pages for two": (
        *("--max-model-len", "160", "--kv-cache-memory-bytes", str(352 * TOKEN_BYTES)),
        "--no-enable-prefix-caching",
    ),
    "guessing": ("--speculative", "ngram", "--max-num-seqs", "4"),
    "longest prefix first": ("--scheduling-policy", "lpm", "--max-num-seqs", "3"),
}


@pytest.fixture(params=SETTINGS, scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A server that has to do it differently."""
    running = RunningServer(*EXACT, *SETTINGS[request.param])
    running.name = request.param
    yield running
    assert running.stop() == 0


def complete(server: RunningServer, case: Expected) -> str:
    """Return a greedy answer; the prompt is token ids, the reference's own."""
    body = {"prompt": case.prompt_ids, "temperature": 0, "max_tokens": NUM_TOKENS}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_every_answer_is_the_reference_s(server: RunningServer, expected: list[Expected]) -> None:
    cases = expected * ROUNDS
    with ThreadPoolExecutor(len(cases)) as pool:
        texts = list(pool.map(lambda case: complete(server, case), cases))
    assert texts == [case.text(NUM_TOKENS) for case in cases]
    match server.name:
        case "nothing shared":
            assert server.metric("prefix_cache_hits_total") == 0
        case "pages for two":
            assert server.metric("num_preemptions_total") > 0
        case "guessing":
            assert server.metric("spec_decode_num_accepted_tokens_total") > 0
        case _:
            assert server.metric("prefix_cache_hits_total") > 0
