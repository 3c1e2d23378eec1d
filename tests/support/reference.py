"""`transformers` on the demo model's weights: the reference of exactness tests."""

import dataclasses
from typing import Any

import pytest
import torch
from demo_in_transformers import demo_model, demo_tokenizer, says

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue, in two sentences.",
    "List five animals that live in Africa.",
    "Translate 'good morning' into Spanish, French and German.",
    "What is 17 times 23? Think step by step.",
    "Write a Python function that reverses a string.",
    "Tell me a story about a fox and a crow. 🦊",
]
NUM_TOKENS = 48
NUM_TOP = 20  # the most that a request may ask for
NUM_TEXTS = 5  # where tokens are listed by their texts, of which some are the same
REPETITION_PENALTY = 1.3
NUM_PENALIZED = 16


@dataclasses.dataclass(frozen=True)
class Likely:
    """Log probability of a token, and the likeliest tokens in its place."""

    logprob: float
    top: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Expected:
    """Greedy decoding of one prompt in fp32."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]  # generated, the end token included
    end: int
    tokenizer: Any
    likely: list[Likely]  # of every token of prompt and answer but the first; of the first prompt
    penalized_ids: list[int]  # generated with REPETITION_PENALTY; the same

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as a conversation."""
        return [{"role": "user", "content": self.prompt}]

    def text(self, num_tokens: int) -> str:
        """Return the text of the first tokens, without the end token."""
        decoded: str = self.tokenizer.decode(self.ids[:num_tokens], skip_special_tokens=True)
        return decoded

    def num_tokens(self, max_tokens: int) -> int:
        """Return how many tokens there are within `max_tokens`."""
        return min(len(self.ids), max_tokens)

    def finish_reason(self, max_tokens: int) -> str:
        """Return why generation ends within `max_tokens`."""
        return "stop" if self.end in self.ids[:max_tokens] else "length"


def own_text(case: Expected, id: int) -> str:
    """Return the text of a token by itself."""
    text: str = case.tokenizer.decode([id])
    return text


def assert_likely(
    case: Expected,
    logprob: float,
    top: list[tuple[str, float]],
    it: Likely,
    tolerance: float,
    num_top: int = NUM_TOP,
) -> None:
    """Compare with the reference; tokens that are equally likely may come in any order."""
    likeliest = it.top[:num_top]
    assert logprob == pytest.approx(it.logprob, abs=tolerance)
    assert [value for _, value in top] == pytest.approx([v for _, v in likeliest], abs=tolerance)
    clear = {own_text(case, id) for id, value in likeliest if value > likeliest[-1][1] + tolerance}
    assert clear <= {text for text, _ in top}


def generate_expected() -> list[Expected]:
    """Generate with `transformers` in fp32, on the weights as GGUF defines them."""
    model, tokenizer = demo_model(), demo_tokenizer()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in PROMPTS
    ]
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    end: int = tokenizer.eos_token_id
    answers = generate_all(model, prompts, end)
    first = torch.tensor(prompts[:1])
    penalized = generate(model, first, NUM_PENALIZED, end, REPETITION_PENALTY)[0, len(prompts[0]) :]
    likely = look(model, torch.tensor([prompts[0] + answers[0]]))
    return [
        Expected(
            PROMPTS[i],
            prompts[i],
            answers[i],
            tokenizer.eos_token_id,
            tokenizer,
            [] if i else likely,
            [] if i else penalized.tolist(),
        )
        for i in range(len(PROMPTS))
    ]


def generate_all(model: Any, prompts: list[list[int]], end: int) -> list[list[int]]:
    """Return the greedy answer to each prompt alone.

    They are generated together, which is faster, and which padding may make others of; so each is
    looked at alone.
    """
    longest = max(map(len, prompts))
    padded = [[end] * (longest - len(prompt)) + prompt for prompt in prompts]
    is_real = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    together = generate(model, torch.tensor(padded), NUM_TOKENS, end, mask=torch.tensor(is_real))
    answers = []
    for prompt, ids in zip(prompts, together[:, longest:].tolist(), strict=True):
        answer = ids[: ids.index(end) + 1] if end in ids else ids
        if not says(model, prompt, answer):
            alone = generate(model, torch.tensor([prompt]), NUM_TOKENS, end)
            answer = alone[0, len(prompt) :].tolist()
        answers.append(answer)
    return answers


def endless_answers(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the greedy answer to each prompt alone, of so many tokens: none ends it."""
    model.generation_config.eos_token_id = None
    outputs = [generate(model, torch.tensor([ids]), num_tokens, end=None) for ids in prompts]
    return [output[0, len(ids) :].tolist() for output, ids in zip(outputs, prompts, strict=True)]


def generate(
    model: Any,
    ids: torch.Tensor,
    num_tokens: int,
    end: int | None,
    repetition_penalty: float = 1.0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return prompts and greedy answers, [prompts, tokens]. `mask` is 0 where `ids` are padding."""
    with torch.inference_mode():
        output: torch.Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            repetition_penalty=repetition_penalty,
            eos_token_id=end,
            pad_token_id=end,
        )
    return output


def look(model: Any, ids: torch.Tensor) -> list[Likely]:
    """Return how likely every token but the first was."""
    with torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].log_softmax(dim=-1)
    best = logprobs.topk(NUM_TOP)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    own = logprobs[range(len(logprobs)), ids[0, 1:]].tolist()
    return [
        Likely(logprob, list(zip(*top, strict=True)))
        for logprob, top in zip(own, tops, strict=True)
    ]
