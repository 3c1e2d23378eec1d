"""A model that thinks may think what it likes; what it then says follows the grammar."""

import json
import random
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import pytest
from grammars import allows, mark_ids, matcher, some_text, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from planners import HTTP, make_planner
from schemas import schemas

from headrace.detokenizer_proc.parser_selection import parser_of
from headrace.detokenizer_proc.parsers.pieces import Content, Piece, Thought
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import THOUGHT_MARKS, ThoughtFormat, ToolFormat
from headrace.tokenizer_proc.grammar.grammar_checker import checked, grammar_of
from headrace.tokenizer_proc.grammar.thought_grammar import after_thoughts, opening_of, thoughts_of
from headrace.tokenizer_proc.grammar.tool_grammar import demanded_calls, or_calls_of
from headrace.tokenizer_proc.requests.constraints import Constraint
from headrace.tokenizer_proc.requests.tools import Function, Tool

# As Qwen3's, in what matters here.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 1e3}, "b": {"enum": ["x", "</think>"]}},
    "required": ["a"],
    "additionalProperties": False,
}
# Each with a text that follows it, and one that does not.
CONSTRAINTS = {
    "schema": (Constraint("json_schema", json.dumps(SCHEMA)), '{"a": 1}', '{"b": "x"}'),
    "regex": (Constraint("regex", "[a-z]+/?"), "yes/", "No"),
    "choice": (Constraint("lark", 'start: "yes" | "no"'), "no", "maybe"),
    "lark": (
        Constraint("grammar", 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/\n%ignore " "'),
        "1 + 2",
        "+",
    ),
    "names of ours": (
        Constraint("grammar", 'start: thoughts SPACE\nthoughts: "x"\nSPACE: "y"'),
        "xy",
        "x",
    ),
    "JSON in Lark": (Constraint("lark", 'start: %json {"type": "integer"}'), "12", "x"),
    "GBNF": (Constraint("grammar", 'root ::= "a" root | "b"'), "aab", "c"),
}


COMPILER: Any = SimpleNamespace(check=matcher)


def byte_ids(text: bytes) -> list[int]:
    """Return ids that spell a text byte by byte, marks included."""
    tokenizer, _ = vocabulary()
    return [id for byte in text for id in tokenizer.encode(chr(byte)).ids]


def read(parsing: Parsing, text: str) -> list[Piece]:
    """Return what a response's text is told as."""
    parser = parser_of(parsing)
    return [*parser.feed(text), *parser.flush()]


def with_thoughts(constraint: Constraint, parsing: Parsing) -> str:
    """Return the grammar of an answer after thoughts."""
    is_lark = constraint.kind in ("lark", "grammar")
    return after_thoughts(thoughts_of(parsing, mark_ids()), grammar_of(constraint), is_lark)


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("format", THOUGHT_MARKS)
def test_thoughts_come_first(format: ThoughtFormat, name: str) -> None:
    constraint, right, wrong = CONSTRAINTS[name]
    begin, end = THOUGHT_MARKS[format]
    inside = with_thoughts(constraint, Parsing(thoughts=format, begins_inside=True))
    outside = with_thoughts(constraint, Parsing(thoughts=format))
    thought = f"\nHm, 1 < 2 {wrong} {right} <b>.\n{end}"
    for space in ("", "\n", "\n\n"):
        assert allows(inside, thought + space + right)
        assert allows(inside, begin + thought + space + right), "marked once more"
        assert allows(outside, begin + thought + space + right)
    assert allows(outside, right)
    assert not allows(inside, right)
    assert not allows(inside, thought + wrong)
    assert not allows(outside, begin + thought + wrong)
    assert not allows(outside, wrong)
    assert not allows(outside, begin + right)


@pytest.mark.parametrize("format", ToolFormat)
def test_thoughts_come_before_calls_that_are_demanded(format: ToolFormat) -> None:
    tool = Tool(Function("now"))
    parsing = Parsing(tools=format, thoughts=ThoughtFormat.QWEN3)
    _, calls = demanded_calls([tool], parsing, mark_ids())
    call = some_text(matcher(calls.source), random.Random(1))
    grammar = with_thoughts(calls, parsing)
    assert allows(grammar, call)
    assert allows(grammar, f"<think>\nNow?</think>\n\n{call}")
    assert not allows(grammar, f"<think>\nNow?{call}")


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_harmony_has_headers_before_what_is_held(name: str) -> None:
    constraint, right, wrong = CONSTRAINTS[name]
    parsing = Parsing(tools=ToolFormat.HARMONY, thoughts=ThoughtFormat.HARMONY)
    fields = {
        "thoughts": thoughts_of(parsing, mark_ids()),
        "opening": opening_of(parsing, mark_ids()),
    }
    wanted = msgspec.structs.replace(constraint, **fields)
    _, both = or_calls_of([Tool(Function("now"))], ("f", wanted), parsing, mark_ids())
    thought = f"<|channel|>analysis<|message|>Hm, {wrong} <b>.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    grammar = checked(COMPILER, both)
    for opening in ("", thought):
        assert allows(grammar, opening + final + right)
        assert allows(grammar, opening + call)
        assert not allows(grammar, opening + final + wrong)
        assert not allows(grammar, opening + right)
        assert not allows(grammar, opening + final + call)
    assert not allows(checked(COMPILER, wanted), call)


def test_an_end_that_is_a_special_token_is_not_written_as_text() -> None:
    constraint, _, _ = CONSTRAINTS["schema"]
    parsing = Parsing(thoughts=ThoughtFormat.MISTRAL, begins_inside=True)
    found = matcher(with_thoughts(constraint, parsing))
    spelled = b"Hm [/THIN [/THINK"
    assert found.try_consume_tokens(byte_ids(spelled)) == len(spelled)
    assert found.try_consume_tokens(byte_ids(b"]")) == 0
    assert found.try_consume_tokens(byte_ids(b" ]")) == 2


@given(
    format=st.sampled_from([*THOUGHT_MARKS]),
    inside=st.booleans(),
    schema=schemas,
    seed=st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_what_is_written_is_read_as_thoughts_and_a_valid_answer(
    format: ThoughtFormat, inside: bool, schema: dict[str, Any], seed: int
) -> None:
    parsing = Parsing(thoughts=format, begins_inside=inside)
    constraint = Constraint("json_schema", json.dumps(schema), space="")
    begin, end = THOUGHT_MARKS[format]
    text = some_text(
        matcher(with_thoughts(constraint, parsing)),
        random.Random(seed),
        hints=("Hm", begin, end, end[:-1]),
    )
    pieces = read(parsing, text)
    answer = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    jsonschema.validate(json.loads(answer), schema)
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    assert thought.strip() in text[: text.find(end)]
    assert end in text or not inside


def grammar(template: str = TEMPLATE, **fields: Any) -> str:
    """Return the grammar of an answer of a model that thinks, its thoughts' rules first."""
    planner = make_planner(2000, chat_template=template, thought_format=ThoughtFormat.QWEN3)
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": JSON} | fields
    sequences = planner.plan("chat", HTTP, json.dumps(body).encode())
    return sequences.requests[0].grammar.decode()


JSON = {"type": "json_object"}


def test_a_request_says_whether_there_are_thoughts() -> None:
    assert grammar().startswith('response_format: thoughts: ("<think>" inside)?\n')
    assert grammar(TEMPLATE + "<think>\n").startswith(
        'response_format: thoughts: ("<think>")? inside\n'
    )
    closed = grammar(chat_template_kwargs={"enable_thinking": False})
    assert closed == 'response_format: {"type":"object"}'
    assert grammar(response_format=None) == ""
