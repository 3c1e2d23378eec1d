"""Request bodies at a share of the largest accepted size of each kind, or beyond it. Pure.

Sizes are those of the limits in `tokenizer_proc/`, or past them. The worst kinds come first.
"""

import json
import random
from collections.abc import Callable
from typing import Any

BODY_BYTES = 32 << 20  # --max-body-bytes
FIRST_ID, END_ID = 1000, 40000
LONGEST = b"9225,"  # of the demo model: a line end and 48 spaces
WORDS = [
    "the",
    "river",
    "a",
    "fox",
    "and",
    "some",
    "old",
    "stones",
    "under",
    "moonlight",
    "while",
    "你好",
    "мир",
    "🙂",
]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
Body = tuple[str, bytes]  # a path and what is posted there
Kind = Callable[[random.Random, float], Body]  # the float: the share of the largest size, up to 1


def ids(rng: random.Random, count: int) -> list[int]:
    """Return so many token ids."""
    return rng.choices(range(FIRST_ID, END_ID), k=count)


def words(rng: random.Random, count: int) -> str:
    """Return so many words."""
    return " ".join(rng.choices(WORDS, k=count))


def of(share: float, count: int) -> int:
    """Return a share of a number, at least 1."""
    return max(1, int(share * count))


def body(path: str, **fields: Any) -> Body:
    """Return a request."""
    return path, json.dumps({"ignore_eos": True} | fields).encode()


def prompt_logprobs(rng: random.Random, share: float) -> Body:
    """Request log probabilities of 60 long prompts."""
    tokens = ids(rng, of(share, 60 * 8000))
    prompts = [tokens[at : at + 8000] for at in range(0, len(tokens), 8000)]
    return body(TEXT, prompt=prompts, max_tokens=1, prompt_logprobs=20)


def logprobs(rng: random.Random, share: float) -> Body:
    """Request log probabilities of 60 long texts."""
    return body(TEXT, prompt=ids(rng, 8), n=of(share, 60), max_tokens=3000, logprobs=20)


def one_long_text(rng: random.Random, share: float) -> Body:
    """Request one long text as a whole response."""
    message = {"role": "user", "content": words(rng, 10)}
    options = {
        "logprobs": True,
        "top_logprobs": 20,
        "temperature": 2,
        "max_tokens": of(share, 6000),
    }
    return body(CHAT, messages=[message], **options)


def detokenize(rng: random.Random, share: float) -> Body:
    """Have ids made into a text, ten times as long as the body."""
    return "/detokenize", b'{"tokens":[' + LONGEST * of(share, 6_000_000) + b"1]}"


def tokenize(rng: random.Random, share: float) -> Body:
    """Tokenize a text, with token strings in the response."""
    text = words(rng, 1000)
    return body(
        "/tokenize",
        prompt=(text + " ") * of(share, 24_000_000 // len(text)),
        return_token_strs=True,
    )


def echo(rng: random.Random, share: float) -> Body:
    """Echo many prompts with their continuations."""
    prompts = [words(rng, 2000) for _ in range(of(share, 128))]
    return body(TEXT, prompt=prompts, echo=True, max_tokens=16, logprobs=20)


def many_streams(rng: random.Random, share: float) -> Body:
    """Have as many texts as there may be in one stream."""
    return body(
        TEXT, prompt=ids(rng, 100), n=of(share, 128), max_tokens=300, stream=True, logprobs=20
    )


def conditions(rng: random.Random, share: float) -> Body:
    """Give as many stop strings, banned words and biases as there may be."""
    fields = {
        "stop": [chr(97 + number % 26) * 999 + str(number % 10) for number in range(32)],
        "bad_words": [words(rng, 20) for _ in range(128)],
        "logit_bias": {str(id): 1 for id in ids(rng, 1024)},
        "stop_token_ids": list(range(256)),
        "repetition_penalty": 1.1,
    }
    return body(TEXT, prompt=words(rng, 5000), n=of(share, 16), max_tokens=100, **fields)


def many_messages(rng: random.Random, share: float) -> Body:
    """Bring a conversation without end."""
    messages = [
        {"role": rng.choice(("user", "assistant")), "content": "x"}
        for _ in range(of(share, 300_000))
    ]
    return body(CHAT, messages=messages, max_tokens=1)


def tools(rng: random.Random, share: float) -> Body:
    """Offer as many tools as there may be."""
    fields = {f"field_{number}": {"type": "string"} for number in range(20)}
    offered = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": words(rng, 60),
                "parameters": {"type": "object", "properties": fields},
            },
        }
        for number in range(of(share, 128))
    ]
    message = {"role": "user", "content": "call all of them"}
    return body(CHAT, messages=[message], tools=offered, tool_choice="required", max_tokens=50)


def schema(rng: random.Random, share: float) -> Body:
    """Demand an answer of a large schema."""
    names = [f"{words(rng, 2)} {number}" for number in range(of(share, 1500))]
    object_schema = {
        "type": "object",
        "properties": {name: {"enum": [name, 1, None]} for name in names},
        "required": names,
    }
    return body(TEXT, prompt="x", max_tokens=300, guided_json=object_schema)


def choices(rng: random.Random, share: float) -> Body:
    """Demand one of as many texts as there may be."""
    return body(
        TEXT,
        prompt="x",
        n=32,
        max_tokens=64,
        guided_choice=[words(rng, 5) for _ in range(of(share, 4096))],
    )


def regex(rng: random.Random, share: float) -> Body:
    """Demand a text of an expression that is hard to compile."""
    return body(TEXT, prompt="x", max_tokens=64, guided_regex=f"(a|b)*a(a|b){{{of(share, 999)}}}")


def responses(rng: random.Random, share: float) -> Body:
    """Bring many items to /v1/responses."""
    items = [{"role": "user", "content": words(rng, 3)} for _ in range(of(share, 100_000))]
    return body("/v1/responses", input=items, max_output_tokens=1)


def calls(rng: random.Random, share: float) -> Body:
    """Bring calls without an answer in between to /v1/responses."""
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    return body("/v1/responses", input=[call] * of(share, 200_000), max_output_tokens=1)


def metadata(rng: random.Random, share: float) -> Body:
    """Have each event of a response repeat what the request brings."""
    kept = {"key": words(rng, of(share, 160_000))}
    return body("/v1/responses", input="x", max_output_tokens=64, stream=True, metadata=kept)


def references(rng: random.Random, share: float) -> Body:
    """Demand a call whose schema refers to one object again and again."""
    names = [f"{number:x}" for number in range(of(share, 2500))]
    found = {"type": "object", "properties": {n: {"const": "x"} for n in names}, "required": names}
    refs = {"oneOf": [{"$ref": "#/$defs/a"}] * of(share, 2500)}
    schema = {"type": "object", "properties": {"a": refs}, "$defs": {"a": found}}
    offered = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    message = {"role": "user", "content": "call it"}
    return body(CHAT, messages=[message], tools=offered, tool_choice="required", max_tokens=4)


def messages(rng: random.Random, share: float) -> Body:
    """Bring many blocks to /v1/messages."""
    blocks = [{"type": "text", "text": words(rng, 3)} for _ in range(of(share, 100_000))]
    return body("/v1/messages", messages=[{"role": "user", "content": blocks}], max_tokens=1)


def generate(rng: random.Random, share: float) -> Body:
    """Bring many texts to /generate, with the log probabilities of all their tokens."""
    texts = [words(rng, 1000) for _ in range(of(share, 128))]
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
    return body("/generate", text=texts, sampling_params={"max_new_tokens": 4}, **options)


def wide_json(rng: random.Random, share: float) -> Body:
    """Bring a field that is not known, with a million fields of its own."""
    return body(
        TEXT,
        prompt="x",
        max_tokens=1,
        surprise={str(n): rng.random() for n in range(of(share, 700_000))},
    )


def deep_json(rng: random.Random, share: float) -> Body:
    """Bring brackets only."""
    opening = rng.choice((b"[", b'{"a":'))
    return TEXT, b'{"prompt": "x", "tools": ' + opening * of(
        share, BODY_BYTES // len(opening) - 100
    )


def one_character(rng: random.Random, share: float) -> Body:
    """Bring a prompt that is one character again and again."""
    character = rng.choice((" ", "a", "\n", "🙂", "\u0301", "<|im_start|>"))
    return body(TEXT, prompt=character * of(share, 4_000_000 // len(character)), max_tokens=1)


KINDS: dict[str, Kind] = {
    kind.__name__.replace("_", " "): kind
    for kind in (
        prompt_logprobs, logprobs, detokenize, generate, one_long_text, tokenize, echo,
        many_streams, conditions, many_messages, tools, schema, choices, regex, responses,
        calls, metadata, references, messages, wide_json, deep_json, one_character,
    )
}  # fmt: skip
