"""Greedy text is what `transformers` says, however the engine cuts, shares, preempts or guesses."""

from typing import Any, NamedTuple

import httpx
import pytest
from reference import NUM_TEXTS, NUM_TOKENS, Expected, assert_likely
from servers import HELD, RunningServer

from headrace.config.model_card import find_demo_model

TIMEOUT_S = 300
EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")
TOKEN_BYTES = 2 * 4 * 30 * 3 * 64  # SmolLM2-135M's keys and values in fp32
NUM_CASES = 5
ROUNDS = 2  # so that every prompt is known when it comes again
TOLERANCE = 1e-3  # of log probabilities


class Setting(NamedTuple):
    """Flags, and the metric that shows whether they had an effect."""

    flags: tuple[str, ...]
    metric: str = "prefix_cache_hits_total"
    happens: bool = True


SETTINGS = {
    "nothing shared": Setting(("--no-enable-prefix-caching",), happens=False),
    "one step ahead": Setting(
        ("--async-scheduling", "--max-num-batched-tokens", "13", "--max-num-seqs", "11"),
        "engine_steps_ahead_total",
    ),
    "pages for two": Setting(
        (
            "--async-scheduling",
            *("--max-model-len", "160", "--kv-cache-memory-bytes", str(352 * TOKEN_BYTES)),
            "--no-enable-prefix-caching",
        ),
        "num_preemptions_total",
    ),
    "guessing": Setting(
        ("--draft-model", str(find_demo_model()), "--max-num-seqs", "4"),
        "spec_decode_num_accepted_tokens_total",
    ),
    "longest prefix first": Setting(("--scheduling-policy", "lpm", "--max-num-seqs", "3")),
}


def complete(server: RunningServer, case: Expected) -> Any:
    """Return a greedy answer; the prompt is token ids, the reference's own.

    Where it is known how likely each token was, that is asked for, too.
    """
    body = {"prompt": case.prompt_ids, "temperature": 0, "max_tokens": NUM_TOKENS}
    body |= {"logprobs": NUM_TEXTS} if case.likely else {}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def check_logprobs(case: Expected, told: Any) -> None:
    """Compare the log probabilities of an answer with the reference's."""
    first, count = len(case.prompt_ids) - 1, len(told["tokens"])
    assert count >= len(case.ids) - 1, "all but the stop token"
    rows = told["token_logprobs"], told["top_logprobs"], case.likely[first : first + count]
    for logprob, top, it in zip(*rows, strict=True):
        listed = sorted(top.items(), key=lambda item: -item[1])[:NUM_TEXTS]
        assert_likely(case, logprob, listed, it, TOLERANCE, NUM_TEXTS)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_answer_is_the_reference_s(name: str, expected: list[Expected]) -> None:
    setting = SETTINGS[name]
    server = RunningServer(*EXACT, *setting.flags, *HELD)
    try:
        cases = expected[:NUM_CASES] * ROUNDS
        choices = server.ask_together(lambda case: complete(server, case), cases)
        assert [one["text"] for one in choices] == [case.text(NUM_TOKENS) for case in cases]
        for case, choice in zip(cases, choices, strict=True):
            if case.likely:
                check_logprobs(case, choice["logprobs"])
        assert (server.metric(setting.metric) > 0) == setting.happens
        assert server.stop() == 0
    finally:
        server.close()
