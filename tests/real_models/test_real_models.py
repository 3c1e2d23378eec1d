"""Files that people download give the tokens that transformers makes of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from demo_in_transformers import says
from reference import PROMPTS
from weather_tool import WEATHER

from headrace import Engine, SamplingParams
from headrace.client.responses import ChatCompletion
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.tokenizer_proc.encoding.probe_texts import CORPUS

NUM_TOKENS = 32
CONVERSATIONS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
EXACT = {"dtype": "float32", "kv_cache_dtype": "float32"}
MIN_SHARE = 0.97  # of tokens that remain transformers' own with rounded activations and keys


@pytest.fixture(scope="session")
def exact(real_file: Path) -> Iterator[Engine]:
    """An engine that rounds nothing."""
    with Engine(real_file, max_model_len=1024, **EXACT) as engine:
        yield engine


def answers(engine: Engine) -> list[ChatCompletion]:
    """Answer all prompts at once, greedily."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return engine.chat(CONVERSATIONS, params, use_tqdm=False, return_token_ids=True)


def ids_of(completion: ChatCompletion) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and answer."""
    prompt, answer = completion.prompt_token_ids, completion.choices[0].token_ids
    assert prompt and answer
    return prompt, answer


def test_tokens_of_many_scripts_are_transformers_own(
    real_file: Path, reference_tokenizer: Any
) -> None:
    ours = tokenizers.Tokenizer.from_buffer(read_tokenizer_json(real_file))
    for text in CORPUS:
        assert ours.encode(text).ids == reference_tokenizer(text).input_ids, text


@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_prompts_are_those_of_the_files_template(
    tools: list[dict[str, Any]] | None, exact: Engine, reference_tokenizer: Any
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße"},
        {"role": "assistant", "content": "你好"},
        {"role": "user", "content": "What is the weather in Köln?"},
    ]
    (completion,) = exact.chat(
        messages, SamplingParams(max_tokens=1), return_token_ids=True, tools=tools
    )
    expected = reference_tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert ids_of(completion)[0] == reference_tokenizer(expected).input_ids


def test_greedy_tokens_are_transformers_own(exact: Engine, reference_model: Any) -> None:
    for completion in answers(exact):
        prompt, answer = ids_of(completion)
        assert len(answer) == NUM_TOKENS
        assert says(reference_model, prompt, answer)


def test_rounded_activations_keep_most_tokens(real_file: Path, reference_model: Any) -> None:
    with Engine(real_file, max_model_len=1024) as engine:
        completions = answers(engine)
    same = total = 0
    for completion in completions:
        prompt, answer = ids_of(completion)
        with torch.inference_mode():
            logits = reference_model(torch.tensor([prompt + answer[:-1]])).logits[0]
        likeliest = logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
        same += sum(a == b for a, b in zip(answer, likeliest, strict=True))
        total += len(answer)
    print(
        f"{real_file.name}: {same} of {total} tokens are transformers' own after those before them"
    )
    assert same >= MIN_SHARE * total
