"""Penalties look at what workers keep of texts: no death, preemption or split changes a text."""

import asyncio
from typing import Any

import pytest
from killer import Killer
from servers import RunningServer
from stream_reader import difference, read_all

TOKEN_BYTES = 2 * 4 * 30 * 3 * 64  # SmolLM2-135M's keys and values in fp32
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
ASKED: dict[str, Any] = {"num_requests": 7, **PENALTIES}  # one of each kind of sampling
EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")
SETTINGS: dict[str, tuple[str, ...]] = {
    "pages for two": (
        *("--max-model-len", "160", "--kv-cache-memory-bytes", str(352 * TOKEN_BYTES)),
        *("--no-enable-prefix-caching", "--async-scheduling"),
    ),
    "two workers": ("--tp", "2", "--async-scheduling"),
    "two stages": ("--pp", "2", "--max-num-seqs", "4"),
}


@pytest.fixture(scope="module")
def undisturbed(server: RunningServer) -> list[Any]:
    """The answers of one worker that lives."""
    answers = asyncio.run(read_all(server.url, **ASKED))
    plain = asyncio.run(read_all(server.url, num_requests=ASKED["num_requests"]))
    assert all(
        texts_that_differ(*([one] for one in pair)) for pair in zip(answers, plain, strict=True)
    )
    return answers


def texts_that_differ(answers: list[Any], expected: list[Any]) -> list[Any]:
    """Return what differs but for log probabilities: several workers sum in another order."""
    return [found for found in difference(answers, expected) if ".logprobs" not in found[1]]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_penalized_text_stays_when_its_worker_is_killed(
    undisturbed: list[Any], name: str
) -> None:
    server = RunningServer(*EXACT, *SETTINGS[name], "--admin-api-key", "operator")
    try:
        killer = Killer(server, "worker 1" if name == "two stages" else "worker 0", [20, 90])
        for seen in (killer, lambda: None):
            answers = asyncio.run(read_all(server.url, seen, **ASKED))
            assert not texts_that_differ(answers, undisturbed)
        assert killer.killed
        if name == "pages for two":
            assert server.metric("num_preemptions_total") > 0
        server.settle()
    finally:
        server.close()
