"""What is drawn under a grammar follows it, whatever the logits are."""

import functools
import json
from array import array
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from reference_sampler import make_rows
from schemas import Schema, schemas
from tokenizers import Tokenizer

from headrace.config.model_card import find_demo_model, read_gguf
from headrace.engine_proc.sequence.grammar_matcher import GrammarMatcher
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.engine_proc.worker.execution.cpu_sampler import Masks, Sampler
from headrace.model.grammar_compiler import GrammarCompiler
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.tokenizer_proc.grammar.grammar_checker import grammar_of
from headrace.tokenizer_proc.requests.constraints import of_schema

MAX_TOKENS = 400
NO_DRAFTS = array("i")
AMBIGUOUS = r"""
start: /x{50}/ a*
a: b b | b | c
b: c c | c | a
c: /[a-z ]/ | a
"""  # in more ways the longer it gets, after a harmless beginning
MODEL = find_demo_model()
assert MODEL is not None
CARD = read_gguf(MODEL)
(EOS,) = CARD.eos_token_ids


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(CARD.path, CARD.vocab_size, CARD.eos_token_ids)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_buffer(read_tokenizer_json(Path(CARD.path)))


@functools.cache
def area() -> GrammarBitmask:
    return GrammarBitmask.create(8, CARD.vocab_size)


def masks(num_masks: int = 8) -> Masks:
    found = np.frombuffer(area().buffer, np.uint32, num_masks * area().num_words)
    return found.reshape(num_masks, -1)


@functools.cache
def sampler() -> Sampler:
    return Sampler(CARD.vocab_size)


@functools.cache
def leanings() -> Any:
    """Logits of a model that likes what ends a string, a number, an array, an object, a text."""
    logits = np.zeros(CARD.vocab_size, np.float32)
    for text in ('"', "]", "}", ",", "0", "a"):
        logits[tokenizer().token_to_id(text)] = 9
    logits[EOS] = 9
    return logits


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def schema_grammar(schema: Schema) -> str:
    return grammar_of(of_schema(schema, "[ \n]{1,3}"))


def matcher_of(grammar: str) -> GrammarMatcher:
    return GrammarMatcher(compiler().compile(grammar).deep_copy(), frozenset([EOS]))


def allowed(row: int) -> set[int]:
    """Return the tokens that a mask allows."""
    bits = np.unpackbits(masks()[row].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def ids_of(text: str) -> "array[int]":
    return array("i", tokenizer().encode(text, add_special_tokens=False).ids)


def follow(grammar: str, seed: int, logits: Any) -> str | None:
    """Return a text that is drawn under a grammar; None is one that has not ended."""
    matcher, tokens = matcher_of(grammar), array("i")
    while len(tokens) < MAX_TOKENS:
        matcher.fill(tokens, NO_DRAFTS, area(), 0)
        assert not matcher.is_stuck
        rows = make_rows(1, seed=seed, position=len(tokens))
        row = np.zeros(1, np.int32)
        ((token,), _) = sampler().sample(logits[None], rows, masked_rows=row, masks=masks(1))
        if token == EOS:
            return tokenizer().decode(tokens.tolist(), skip_special_tokens=False)
        tokens.append(int(token))
    return None


@settings(max_examples=60, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_what_is_drawn_under_a_schema_is_valid(schema: Schema, seed: int) -> None:
    text = follow(schema_grammar(schema), seed, leanings())
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


def test_most_texts_under_a_schema_end() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    texts = [follow(schema_grammar(schema), seed, leanings()) for seed in range(10)]
    assert sum(text is not None for text in texts) > 5


def test_only_what_may_come_is_allowed_and_eos_only_at_an_end() -> None:
    matcher = matcher_of(regex("(ab)+"))
    matcher.fill(array("i"), NO_DRAFTS, area(), 0)
    starts = {tokenizer().decode([token]) for token in allowed(0)}
    assert "a" in starts
    assert all(("ab" * 9).startswith(start) for start in starts)
    matcher.fill(ids_of("ab"), NO_DRAFTS, area(), 0)
    assert EOS in allowed(0)


def test_a_grammar_that_is_complete_allows_eos_alone() -> None:
    matcher = matcher_of(regex("a{3}"))
    matcher.fill(ids_of("aaa"), NO_DRAFTS, area(), 0)
    assert allowed(0) == {EOS}


def masks_of(grammar: str, tokens: "array[int]") -> list[set[int]]:
    """Return what may come after each of `tokens`, token by token."""
    matcher, found = matcher_of(grammar), []
    for end in range(len(tokens) + 1):
        matcher.fill(tokens[:end], NO_DRAFTS, area(), 0)
        found.append(allowed(0))
    return found


def test_drafts_have_the_masks_of_tokens_and_leave_no_trace() -> None:
    grammar = regex("[0-9]{2,6}")
    tokens = ids_of("1234")
    expected = masks_of(grammar, tokens)
    matcher = matcher_of(grammar)
    for end in range(len(tokens) + 1):
        matcher.fill(tokens[:end], tokens[end:], area(), 2)
        found = [allowed(2 + place) for place in range(len(tokens) - end + 1)]
        assert found == expected[end:]
        assert not matcher.is_stuck


@pytest.mark.parametrize("wrong", ["x", "<|im_end|>"])
def test_a_draft_that_is_banned_is_not_followed(wrong: str) -> None:
    grammar = regex("[0-9]+")
    (digit, bad) = ids_of("1")[0], tokenizer().encode(wrong).ids[0]
    matcher = matcher_of(grammar)
    matcher.fill(array("i"), array("i", [digit, bad, digit]), area(), 0)
    assert (bad in allowed(1)) == (bad == EOS)
    assert len(allowed(2)) == len(allowed(3)) == 32 * area().num_words
    matcher.fill(array("i", [digit]), NO_DRAFTS, area(), 0)
    assert digit in allowed(0)
    assert not matcher.is_stuck


def test_a_grammar_that_gets_too_complex_sticks_and_bans_nothing() -> None:
    grammar = LLMatcher.grammar_from_lark(AMBIGUOUS)
    compiler().check(grammar)
    matcher = matcher_of(grammar)
    matcher.fill(array("i"), NO_DRAFTS, area(), 0)
    assert not matcher.is_stuck
    matcher.fill(ids_of("x" * 50 + "aaaa"), NO_DRAFTS, area(), 0)
    assert matcher.is_stuck
    assert len(allowed(0)) == 32 * area().num_words


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (regex("(a{1000}){1000}"), "too many expressions"),
        (LLMatcher.grammar_from_lark('start: start "a"'), "NoExtension"),
        (regex("("), "unclosed group"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_found_out(grammar: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        compiler().check(grammar)
