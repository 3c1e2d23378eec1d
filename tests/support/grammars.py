"""Grammars for a tokenizer of bytes and some marks: allowed tokens, and texts under them."""

import functools
import random

import tokenizers
from llguidance import LLMatcher, LLTokenizer

from headrace.model.output_formats import HARMONY_MARKS

END = "<|eos|>"
MARKS = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>", "[THINK]", "[/THINK]")
MARKS += ("｜DSML｜", "<|tool_call>", '<|"|>', "<|channel>", "<channel|>", *HARMONY_MARKS)


@functools.cache
def vocabulary() -> tuple[tokenizers.Tokenizer, LLTokenizer]:
    """Return a tokenizer of bytes and of `MARKS`, which are special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({char: id for id, char in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *MARKS])
    eos = tokenizer.token_to_id(END)
    return tokenizer, LLTokenizer(tokenizer.to_str(), eos_token=eos)


def mark_ids() -> dict[str, int]:
    """Return the ids of the marks."""
    return {mark: vocabulary()[0].token_to_id(mark) for mark in MARKS}


def matcher(grammar: str) -> LLMatcher:
    """Return what a text under a grammar has to match."""
    found = LLMatcher(vocabulary()[1], grammar, log_level=0)
    assert not found.is_error(), found.get_error() + grammar
    return found


def allows(grammar: str, text: str) -> bool:
    """Whether a whole text may be written under a grammar."""
    found = matcher(grammar)
    ids = vocabulary()[0].encode(text, add_special_tokens=False).ids
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


def some_text(found: LLMatcher, random: random.Random, hints: tuple[str, ...] = ()) -> str:
    """Return a text that a grammar allows, which ends as soon as it can.

    Now and then one of `hints` is written, as far as it is allowed: bytes drawn alone make none.
    """
    tokenizer, _ = vocabulary()
    eos = tokenizer.token_to_id(END)
    ids: list[int] = []
    while not found.is_stopped() and len(ids) < 1000:
        mask = found.compute_bitmask()
        allowed = [8 * i + b for i, byte in enumerate(mask) for b in range(8) if byte >> b & 1]
        if eos in allowed:
            break
        if hints and random.random() < 0.2:
            hint = tokenizer.encode(random.choice(hints), add_special_tokens=False).ids
            taken = found.try_consume_tokens(hint)
            ids += hint[:taken]
        else:
            ids.append(random.choice(allowed))
            found.consume_token(ids[-1])
    assert found.is_accepting()
    return tokenizer.decode(ids, skip_special_tokens=False)
