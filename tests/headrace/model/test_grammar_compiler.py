"""Grammars and added tokens: a text may be made of all that the tokenizer does not call special."""

import contextlib
import json
import random

import msgspec
import numpy as np
import pytest
from added_tokens import MODELS, Model, model
from llguidance import LLMatcher
from tool_calls import CALLS, FORECAST, NOW, tools

from headrace.ipc.messages import Parsing
from headrace.model.output_formats import THOUGHT_MARKS, ThoughtFormat, ToolFormat
from headrace.tokenizer_proc.grammar.grammar_checker import checked
from headrace.tokenizer_proc.grammar.thought_grammar import thoughts_of
from headrace.tokenizer_proc.grammar.tool_grammar import demanded_calls, or_calls_of
from headrace.tokenizer_proc.requests.constraints import Constraint, of_choice

pytestmark = pytest.mark.slow

TAG = {
    "type": "triggered_tags",
    "triggers": ["<tool_call>"],
    "tags": [
        {
            "type": "tag",
            "begin": "<tool_call>",
            "content": {"type": "json_schema", "json_schema": {"const": "<h1>"}},
            "end": "</tool_call>",
        }
    ],
}
# By kind: a constraint, and a text under it. Texts are written with added tokens, and without.
KINDS = {
    "regex": (Constraint("regex", "<h1>[a-z ]{1,20}</h1>"), "<h1>hi you</h1>"),
    "schema": (
        Constraint("json_schema", json.dumps({"const": "<h1>hi</h1>"})),
        '"<h1>hi</h1>"',
    ),
    "free strings": (
        Constraint("json_schema", json.dumps({"type": "string"})),
        '"a <td><tool_call></think> é"',
    ),
    "choice": (of_choice(["<h1>hi</h1>", "<td>", "<tool_call>\n"], "choice"), "<h1>hi</h1>"),
    "special names": (of_choice(["<|im_end|>!", "<|im_"], "choice"), "<|im_end|>!"),
    "not NFC": (of_choice(["e\u0301<h1>"], "choice"), "e\u0301<h1>"),
    "Lark": (
        Constraint("grammar", 'start: "<td>" NUMBER ("\\n\\n" NUMBER)*\nNUMBER: /[0-9]+/'),
        "<td>1\n\n22",
    ),
    "GBNF": (Constraint("grammar", 'root ::= "<h1>" root "</h1>" | "é"'), "<h1><h1>é</h1></h1>"),
    "structural tag": (
        Constraint("structural_tag", json.dumps({"format": TAG})),
        'I <td> call: <tool_call>"<h1>"</tool_call> now.',
    ),
}

# Each format with two of the models, each model with half of the formats.
PAIRS = [
    (MODELS[(place + more) % len(MODELS)], format)
    for place, format in enumerate(ToolFormat)
    for more in (0, 2)
]


def grammar_of(model: Model, constraint: Constraint, parsing: Parsing | None = None) -> str:
    """Return a constraint's grammar, as a request's is made."""
    special = model.special if constraint.kind == "structural_tag" else {}
    thoughts = "" if parsing is None else thoughts_of(parsing, model.special)
    whole = msgspec.structs.replace(constraint, thoughts=thoughts, special_tokens=special)
    return checked(model.compiler, whole)


def spellings(model: Model, text: str) -> list[list[int]]:
    """Return ways to write a text: up to each byte by bytes, and from there on by tokens."""
    data, found = text.encode(), []
    for cut in range(len(data) + 1):
        head, tail = model.bytes_of(data[:cut]), data[cut:]
        with contextlib.suppress(UnicodeDecodeError):
            ids = model.ids(tail.decode())
            spelled = b"".join(model.table.token_bytes[id] for id in ids)
            is_text = spelled == tail and not {*ids} & {*model.special.values()}
            found.append(head + (ids if is_text else model.bytes_of(tail)))
    return found


def allowed(matcher: LLMatcher) -> set[int]:
    """Return the tokens that may come next."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert not matcher.is_error(), matcher.get_error()
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def check_written(model: Model, grammar: str, text: str) -> None:
    """Check that a text is accepted however it is spelled, and can be drawn under the masks."""
    start = model.compiler.compile(grammar)
    for ids in spellings(model, text):
        matcher = start.deep_copy()
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()
    rng = random.Random(1)
    matcher, rest = start.deep_copy(), text.encode()
    while rest:
        fitting = allowed(matcher) & model.begins(rest)
        assert fitting, rest
        token = rng.choice(sorted(fitting))
        assert matcher.consume_token(token)
        rest = rest[len(model.table.token_bytes[token]) :]
    assert set(model.ends) <= allowed(matcher)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_text_crosses_added_tokens_anywhere(name: str, kind: str) -> None:
    constraint, text = KINDS[kind]
    check_written(model(name), grammar_of(model(name), constraint), text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_thoughts_end_by_a_token_or_its_bytes(name: str, kind: str) -> None:
    constraint, text = KINDS[kind]
    for thoughts in (ThoughtFormat.QWEN3, ThoughtFormat.MISTRAL):
        begin, end = THOUGHT_MARKS[thoughts]
        for begins_inside in (True, False):
            parsing = Parsing(thoughts=thoughts, begins_inside=begins_inside)
            grammar = grammar_of(model(name), constraint, parsing)
            opening = "" if begins_inside else begin
            check_written(model(name), grammar, f"{opening}is it <h1>?{end}\n{text}")


@pytest.mark.parametrize(("name", "format"), PAIRS)
def test_demanded_calls_are_written(name: str, format: ToolFormat) -> None:
    for thoughts in (None, ThoughtFormat.QWEN3):
        parsing = Parsing(tools=format, thoughts=thoughts)
        _, constraint = demanded_calls(tools(FORECAST, NOW), parsing, model(name).special)
        grammar = grammar_of(model(name), constraint, parsing)
        check_written(model(name), grammar, CALLS[format])
        if thoughts is not None:
            check_written(model(name), grammar, f"<think>\nrain?\n</think>\n\n{CALLS[format]}")


ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
ANSWERS = ['{"name": "<h1>"}', '{"name":"forecast", "parameters": 3}', '{"name": "forecast"}']
EXOTIC = {
    "name": "exotic",
    "parameters": {
        "type": "object",
        "properties": {"a": {"not": {"type": "string"}}, "b": {"type": "string"}},
        "required": ["b"],
    },
}


@pytest.mark.parametrize(("name", "format"), PAIRS)
def test_an_answer_in_a_schema_or_a_call_is_written(name: str, format: ToolFormat) -> None:
    wanted = "response_format", Constraint("json_schema", json.dumps(ANSWER))
    for thoughts in (None, ThoughtFormat.QWEN3):
        parsing = Parsing(tools=format, thoughts=thoughts)
        both = or_calls_of(tools(FORECAST, NOW), wanted, parsing, model(name).special)
        assert both[0] == "response_format"
        grammar = grammar_of(model(name), both[1], parsing)
        for text in (CALLS[format], *ANSWERS):
            check_written(model(name), grammar, text)
            if thoughts is not None:
                check_written(model(name), grammar, f"<think>rain?</think>{text}")
        matcher = model(name).compiler.compile(grammar)
        wrong = model(name).ids('{"city": 1}')
        assert matcher.try_consume_tokens(wrong) < len(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_answer_may_be_a_call_instead(kind: str) -> None:
    constraint, text = KINDS[kind]
    parsing = Parsing(tools=ToolFormat.HERMES)
    _, both = or_calls_of(tools(NOW), ("field", constraint), parsing, model("qwen").special)
    grammar = grammar_of(model("qwen"), both)
    check_written(model("qwen"), grammar, text)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    if kind == "structural tag":
        assert both == constraint
    else:
        check_written(model("qwen"), grammar, call)


@pytest.mark.parametrize("format", ToolFormat)
def test_a_schema_that_no_grammar_follows_loosens_calls(format: ToolFormat) -> None:
    wanted = "response_format", Constraint("json_schema", json.dumps(ANSWER))
    parsing = Parsing(tools=format)
    _, both = or_calls_of(tools(EXOTIC), wanted, parsing, {})
    grammar = grammar_of(model("qwen"), both)
    text = {
        ToolFormat.HERMES: '<tool_call>\n{"name": "exotic", "arguments": {"b": "x"}}\n</tool_call>',
        ToolFormat.LLAMA3_JSON: '{"name": "exotic", "parameters": {"a": [1], "b": "x"}}',
        ToolFormat.PYTHONIC: '[exotic(a=1, b="x")]',
    }.get(format)
    if text is not None:
        check_written(model("qwen"), grammar, text)
    check_written(model("qwen"), grammar, ANSWERS[0])


@pytest.mark.parametrize("name", MODELS)
def test_special_tokens_are_no_part_of_a_free_text(name: str) -> None:
    found = model(name)
    matcher = found.compiler.compile(LLMatcher.grammar_from_regex("(?s:.*)x"))
    tokens = allowed(matcher)
    assert not tokens & {*found.special.values(), *found.ends}
    for id, token in found.tokenizer.get_added_tokens_decoder().items():
        if not token.special:
            assert found.spelled[found.table.token_bytes[id]] & tokens, token.content
