"""A mark that is a special token is that token: text that spells it is text."""

import itertools
import re

import pytest
from byte_responses import make_plan
from hypothesis import given
from hypothesis import strategies as st
from model_outputs import EXAMPLES, Example

from headrace.detokenizer_proc.parser_selection import marks_of, parser_of
from headrace.detokenizer_proc.parsers.pieces import Call, Gathered, gathered
from headrace.detokenizer_proc.sequence_text import SequenceText
from headrace.detokenizer_proc.text import TableVocabulary
from headrace.ipc.messages import FinishReason, Parsing
from headrace.model.output_formats import (
    HARMONY_MARKS,
    THOUGHT_TOKENS,
    TOOL_MARKS,
    ThoughtFormat,
    ToolFormat,
)
from headrace.model.token_table import TokenTable

MARKS = sorted(
    {mark for table in (TOOL_MARKS, THOUGHT_TOKENS) for mark in {*table.values()} for mark in mark}
)
TABLE = TokenTable(
    [*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in MARKS)],
    frozenset(range(256, 256 + len(MARKS))),
)
BY_MARKS_ALONE = [  # no call is read without one
    ToolFormat.HERMES,
    ToolFormat.MISTRAL,
    ToolFormat.DEEPSEEK_V3,
    ToolFormat.DEEPSEEK_V31,
    ToolFormat.DEEPSEEK_V32,
    ToolFormat.GLM45,
    ToolFormat.KIMI_K2,
    ToolFormat.GEMMA4,
    ToolFormat.HARMONY,
]
HARMONY = Parsing(tools=ToolFormat.HARMONY, thoughts=ThoughtFormat.HARMONY)


def tokens_of(text: str, marks: frozenset[str]) -> list[int]:
    """Return the tokens of a text: some marks are special ones, all else is bytes."""
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text) if marks else [text]
    return [
        token
        for part in parts
        for token in ([256 + MARKS.index(part)] if part in marks else part.encode())
    ]


def read(parsing: Parsing, tokens: list[int], *stops: str) -> Gathered:
    """Return what is read of tokens that come one by one."""
    numbers = itertools.count()
    plan = make_plan(parsing=parsing, stop=[*stops])
    sequence = SequenceText.open(plan, TableVocabulary(TABLE))
    parser = parser_of(parsing, lambda: f"id{next(numbers)}", sequence.marks)
    pieces = []
    for place, token in enumerate(tokens):
        end = FinishReason.LENGTH if place == len(tokens) - 1 else None
        text, _ = sequence.feed([token], end, b"")
        pieces += parser.feed(text)
    return gathered(pieces + parser.flush())


@pytest.mark.parametrize("stops", [(), ("<never>", "[never", "|never")])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.parsing.tools}: {e.text[:40]}")
def test_special_tokens_are_read_as_their_texts(example: Example, stops: tuple[str, ...]) -> None:
    tokens = tokens_of(example.text, marks_of(example.parsing))
    assert read(example.parsing, tokens, *stops) == example.meaning


@pytest.mark.parametrize(
    "example",
    [one for one in EXAMPLES if one.parsing.tools in BY_MARKS_ALONE],
    ids=lambda e: f"{e.parsing.tools}: {e.text[:40]}",
)
def test_marks_that_other_tokens_spell_are_content(example: Example) -> None:
    told = read(Parsing(tools=example.parsing.tools), [*example.text.encode()])
    assert told == Gathered(example.text, "", [])


def test_a_spelled_mark_ends_no_message_and_no_call() -> None:
    said = "<|channel|>analysis<|message|>I write <{0}end{0}>.<|end|><|start|>assistant"
    said += '<|channel|>commentary to=functions.f<|message|>{{"a": "<{0}call{0}>"}}<|call|>'
    tokens = tokens_of(said.format("#"), frozenset(HARMONY_MARKS))
    told = read(HARMONY, [ord("|") if token == ord("#") else token for token in tokens])
    assert told == Gathered("", "I write <|end|>.", [Call("id0", "f", '{"a": "<|call|>"}')])


@given(
    format=st.sampled_from(BY_MARKS_ALONE),
    parts=st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=5)), max_size=8),
)
def test_no_text_becomes_a_call(format: ToolFormat, parts: list[str]) -> None:
    text = "a" + "".join(parts)
    told = read(Parsing(tools=format), [*text.encode()])
    assert told == Gathered(text, "", [])


def test_a_mark_that_is_no_special_token_is_a_mark_in_any_tokens() -> None:
    table = TokenTable(TABLE.token_bytes, frozenset())
    sequence = SequenceText.open(make_plan(parsing=HARMONY), TableVocabulary(table))
    parser = parser_of(HARMONY, marks=sequence.marks)
    said = "<|channel|>final<|message|>Yes<|end|>"
    pieces = parser.feed(sequence.feed([*said.encode()], FinishReason.LENGTH, b"")[0])
    assert gathered(pieces + parser.flush()).text == "Yes"
