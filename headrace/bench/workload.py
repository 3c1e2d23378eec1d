"""The workload: prompts and numbers of tokens to generate, from a file or random.

Nothing here uses a tokenizer. A server counts the tokens of a text in `usage`. A few requests
before the load measure how many tokens its model makes of a word or of a byte.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.errors import ConfigError

# A token each in most vocabularies, with the space before them.
WORDS = re.findall(
    r"\w+",
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education",
)


@dataclass(frozen=True)
class BenchPrompt:
    """One request."""

    text: str
    max_tokens: int
    images: tuple[str, ...] = ()  # URLs, which come before the text
    ids: tuple[int, ...] = ()  # of the text's tokens, which a completion then sends in its place


@dataclass(frozen=True)
class TokenRates:
    """Tokens per word and per byte of a server's model."""

    per_word: float = 1.0  # of `WORDS`
    per_byte: float = 0.25

    def words(self, num_tokens: int) -> int:
        """Return how many words make `num_tokens`."""
        return max(1, round(num_tokens / self.per_word))


def some_words(count: int, random: np.random.Generator) -> str:
    """Return `count` random words, a space before each."""
    return "".join(f" {WORDS[i]}" for i in random.integers(0, len(WORDS), count))


def around(length: int, range_ratio: float, random: np.random.Generator) -> int:
    """Return a length between `length * (1 - range_ratio)` and `length * (1 + range_ratio)`."""
    low, high = int(length * (1 - range_ratio)), int(length * (1 + range_ratio))
    return max(1, int(random.integers(low, high + 1)))


def random_prompts(
    num_prompts: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    rates: TokenRates,
    random: np.random.Generator,
) -> list[BenchPrompt]:
    """Make prompts of random words, all after the same `prefix_len` tokens."""
    prefix = some_words(rates.words(prefix_len), random) if prefix_len else ""
    prompts = []
    for _ in range(num_prompts):
        num_words = rates.words(around(input_len, range_ratio, random))
        text = prefix + some_words(num_words, random)
        prompts.append(BenchPrompt(text, around(output_len, range_ratio, random)))
    return prompts


def prefix_prompts(
    num_prompts: int,
    *,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    rates: TokenRates,
    random: np.random.Generator,
) -> list[BenchPrompt]:
    """Make prompts that share prefixes, as many of each, in random order."""
    prefixes = [some_words(rates.words(prefix_len), random) for _ in range(num_prefixes)]
    prompts = [
        BenchPrompt(
            prefixes[i % num_prefixes] + some_words(rates.words(suffix_len), random), output_len
        )
        for i in range(num_prompts)
    ]
    return [prompts[i] for i in random.permutation(num_prompts)]


class ShareGptTurn(msgspec.Struct):
    """One message of a conversation in a ShareGPT file."""

    value: str = ""


class ShareGptConversation(msgspec.Struct):
    """One conversation of a ShareGPT file."""

    conversations: list[ShareGptTurn] = []
    conversation: list[ShareGptTurn] = []


def sharegpt_prompts(
    path: Path,
    num_prompts: int,
    *,
    output_len: int | None,
    rates: TokenRates,
    random: np.random.Generator,
) -> list[BenchPrompt]:
    """Draw the first messages of conversations, to be answered at the length of the second.

    What is too short or too long is left out, as elsewhere: under 4 tokens, prompts over 1024,
    and 2048 together.

    Raises:
        ConfigError: the file is no ShareGPT file, or has nothing that fits.
    """
    try:
        conversations = msgspec.json.decode(path.read_bytes(), type=list[ShareGptConversation])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: not a ShareGPT file: {error}") from None
    prompts: list[BenchPrompt] = []
    for i in random.permutation(len(conversations)):
        turns = conversations[i].conversations or conversations[i].conversation
        if len(turns) < 2:
            continue
        num_input, num_output = (
            round(len(turn.value.encode()) * rates.per_byte) for turn in turns[:2]
        )
        num_output = output_len or num_output
        if min(num_input, num_output) >= 4 and num_input <= 1024 and num_input + num_output <= 2048:
            prompts.append(BenchPrompt(turns[0].value, num_output))
        if len(prompts) == num_prompts:
            return prompts
    if not prompts:
        raise ConfigError(f"--dataset-path {path}: no conversation has two turns that fit")
    times = -(-num_prompts // len(prompts))
    return (prompts * times)[:num_prompts]


def content_of(prompt: BenchPrompt) -> str | list[dict[str, Any]]:
    """Return the content of a chat's message."""
    if not prompt.images:
        return prompt.text
    images = [{"type": "image_url", "image_url": {"url": url}} for url in prompt.images]
    return [*images, {"type": "text", "text": prompt.text}]


def body_of(prompt: BenchPrompt, kind: str, model: str | None, options: dict[str, Any]) -> bytes:
    """Return a request's body. `kind` is "chat", "completions" or "embeddings"."""
    body: dict[str, Any] = {"model": model} if model is not None else {}
    if kind == "embeddings":
        return msgspec.json.encode(body | {"input": prompt.text} | options)
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": content_of(prompt)}]
    else:
        body["prompt"] = prompt.ids or prompt.text
    body |= {"max_tokens": prompt.max_tokens, "temperature": 0.0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body | options)
