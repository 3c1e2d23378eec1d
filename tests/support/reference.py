"""What `transformers` makes of the demo model's weights: the reference of exactness tests."""

import dataclasses
from typing import Any

import torch
import transformers

from headrace.model_card import find_demo_model

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
NUM_TOP = 5
REPETITION_PENALTY = 1.3
NUM_PENALIZED = 16


@dataclasses.dataclass(frozen=True)
class Likely:
    """How likely a token was, and which were the likeliest in its place."""

    logprob: float
    top: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What greedy decoding in fp32 makes of one prompt."""

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


def generate_expected() -> list[Expected]:
    """What `transformers.generate` says in fp32, on the weights as GGUF defines them."""
    path = find_demo_model()
    assert path is not None, "install the demo model: make install"
    folder, name = str(path.parent), path.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    )
    results = []
    for prompt in PROMPTS:
        conversation = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        output = generate(model, ids, NUM_TOKENS)
        is_first = prompt == PROMPTS[0]
        penalized = generate(model, ids, NUM_PENALIZED, REPETITION_PENALTY) if is_first else ids
        results.append(
            Expected(
                prompt,
                ids[0].tolist(),
                output[0, ids.shape[1] :].tolist(),
                tokenizer.eos_token_id,
                tokenizer,
                look(model, output) if is_first else [],
                penalized[0, ids.shape[1] :].tolist(),
            )
        )
    return results


def generate(
    model: Any, ids: torch.Tensor, num_tokens: int, repetition_penalty: float = 1.0
) -> torch.Tensor:
    """Return prompt and greedy answer, [1, tokens]."""
    with torch.inference_mode():
        output: torch.Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            repetition_penalty=repetition_penalty,
            pad_token_id=model.generation_config.eos_token_id,
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
