"""What a load asks."""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.workload import (
    BenchPrompt,
    TokenRates,
    body_of,
    prefix_prompts,
    random_prompts,
    sharegpt_prompts,
)
from headrace.errors import ConfigError


def seeded() -> np.random.Generator:
    return np.random.default_rng(0)


def some_random(range_ratio: float = 0.0, prefix_len: int = 0) -> list[BenchPrompt]:
    return random_prompts(
        50,
        input_len=100,
        output_len=10,
        range_ratio=range_ratio,
        prefix_len=prefix_len,
        rates=TokenRates(per_word=2.0),
        random=seeded(),
    )


def test_random_prompts_have_the_length_that_is_asked_for() -> None:
    prompts = some_random()
    assert {len(prompt.text.split()) for prompt in prompts} == {50}  # at two tokens a word
    assert {prompt.max_tokens for prompt in prompts} == {10}
    assert len({prompt.text for prompt in prompts}) == 50
    assert prompts == some_random()


def test_lengths_vary_within_their_range() -> None:
    prompts = some_random(range_ratio=0.5)
    lengths = {prompt.max_tokens for prompt in prompts}
    assert 5 <= min(lengths) < max(lengths) <= 15
    assert all(25 <= len(prompt.text.split()) <= 75 for prompt in prompts)


def test_a_prefix_is_common_to_all() -> None:
    prompts = some_random(prefix_len=40)
    beginnings = {" ".join(prompt.text.split()[:20]) for prompt in prompts}
    assert len(beginnings) == 1
    assert {len(prompt.text.split()) for prompt in prompts} == {70}


def test_prefixes_are_shared_evenly_and_in_random_order() -> None:
    prompts = prefix_prompts(
        30,
        num_prefixes=3,
        prefix_len=20,
        suffix_len=10,
        output_len=5,
        rates=TokenRates(),
        random=seeded(),
    )
    beginnings = [" ".join(prompt.text.split()[:20]) for prompt in prompts]
    assert sorted(beginnings.count(one) for one in set(beginnings)) == [10, 10, 10]
    assert beginnings[:3] * 10 != beginnings
    assert len({prompt.text for prompt in prompts}) == 30


def conversation(question: str, answer: str, key: str = "conversations") -> dict[str, object]:
    return {key: [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def test_sharegpt_gives_first_messages_and_response_lengths(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    entries = [
        conversation("q" * 400, "a" * 200),
        conversation("r" * 400, "a" * 800, key="conversation"),
        conversation("too short", "a"),
        conversation("x" * 40000, "too long a question"),
        {"conversations": [{"from": "human", "value": "alone" * 40}]},
    ]
    path.write_text(json.dumps(entries))
    rates = TokenRates(per_byte=0.25)
    prompts = sharegpt_prompts(path, 2, output_len=None, rates=rates, random=seeded())
    assert set(prompts) == {BenchPrompt("q" * 400, 50), BenchPrompt("r" * 400, 200)}
    more = sharegpt_prompts(path, 5, output_len=7, rates=rates, random=seeded())
    assert len(more) == 5
    assert {prompt.max_tokens for prompt in more} == {7}


@pytest.mark.parametrize("text", ["{", "[]", '[{"conversations": []}]'])
def test_a_file_without_conversations_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "chats.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--dataset-path"):
        sharegpt_prompts(path, 2, output_len=None, rates=TokenRates(), random=seeded())


def test_bodies_are_those_of_the_api() -> None:
    prompt = BenchPrompt("hello", 3)
    chat = json.loads(body_of(prompt, "chat", "m", {"ignore_eos": True}))
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert (chat["model"], chat["max_tokens"], chat["stream"]) == ("m", 3, True)
    assert (chat["ignore_eos"], chat["stream_options"]) == (True, {"include_usage": True})
    assert json.loads(body_of(prompt, "completions", "m", {}))["prompt"] == "hello"
    embedding = json.loads(body_of(prompt, "embeddings", "m", {}))
    assert embedding == {"model": "m", "input": "hello"}
