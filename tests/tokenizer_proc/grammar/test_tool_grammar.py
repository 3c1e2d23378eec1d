"""A grammar allows calls of the tools and nothing else, as the model's format has them."""

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest
from grammars import allows, mark_ids, matcher, some_text
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_calls import CALLS, FORECAST, NOW, tools

from headrace.detokenizer_proc.parser_selection import parser_of
from headrace.detokenizer_proc.parsers.pieces import gathered
from headrace.errors import InvalidValue, Unsupported
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import ToolFormat
from headrace.tokenizer_proc.grammar import argument_rules
from headrace.tokenizer_proc.grammar.tool_grammar import ToolGrammar, demanded_calls


def grammar_of(
    format: ToolFormat, *functions: dict[str, Any], special: bool = True, **fields: Any
) -> str:
    ids = mark_ids() if special else {}
    return ToolGrammar(format, ids).of(tools(*functions), **({"may_repeat": True} | fields))


@pytest.mark.parametrize("format", ToolFormat)
def test_calls_are_allowed_as_the_model_writes_them(format: ToolFormat) -> None:
    grammar = grammar_of(format, FORECAST, NOW)
    assert allows(grammar, CALLS[format])
    assert not allows(grammar, CALLS[format].replace("now", "new"))
    assert not allows(grammar, CALLS[format].replace("city", "town"))
    assert not allows(grammar, "I will not.")
    assert not allows(grammar, "")


@pytest.mark.parametrize("format", ToolFormat)
def test_one_call_is_one(format: ToolFormat) -> None:
    assert not allows(grammar_of(format, FORECAST, NOW, may_repeat=False), CALLS[format])


def test_marks_that_are_special_tokens_are_written_as_such() -> None:
    mark = mark_ids()["[TOOL_CALLS]"]
    allowed = matcher(grammar_of(ToolFormat.MISTRAL, NOW)).compute_bitmask()
    assert allowed[mark // 8] >> mark % 8 & 1
    assert sum(byte.bit_count() for byte in allowed) == 1
    assert not allows(grammar_of(ToolFormat.MISTRAL, NOW, special=False), CALLS[ToolFormat.MISTRAL])


PARAMETERS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.sampled_from(
        [
            {"type": "integer", "minimum": 0, "maximum": 99},
            {"type": "boolean"},
            {"enum": ["x", "y"], "type": "string"},
        ]
    ),
)


@given(
    format=st.sampled_from(ToolFormat),
    properties=PARAMETERS,
    required=st.sets(st.sampled_from(["a", "b", "c", "d"])),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_what_is_written_under_a_grammar_is_read_as_a_call(
    format: ToolFormat, properties: dict[str, Any], required: set[str], seed: int
) -> None:
    needed = sorted(required & properties.keys())
    schema = {"type": "object", "properties": properties, "required": needed}
    schema["additionalProperties"] = False
    grammar = grammar_of(format, {"name": "f", "parameters": schema}, may_repeat=False)
    text = some_text(matcher(grammar), random.Random(seed))
    arguments = arguments_in(format, text)
    assert set(needed) <= arguments.keys() <= properties.keys()
    for name, value in arguments.items():
        kind = {"integer": int, "boolean": bool, "string": str}[properties[name]["type"]]
        assert type(value) is kind


def arguments_in(format: ToolFormat, text: str) -> dict[str, Any]:
    """Return the arguments of a text that is one call, read in the plainest way there is."""
    if format in (ToolFormat.PYTHONIC, ToolFormat.LFM2):
        names = {"true": True, "false": False}
        text = text.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")
        body = text.removeprefix("[f(").removesuffix(")]")
        pairs = [pair.split("=") for pair in body.split(", ") if pair]
        return {n: names[value] if value in names else json.loads(value) for n, value in pairs}
    if format is ToolFormat.QWEN3_CODER:
        parts = [p.split(">\n", 1) for p in text.split("<parameter=")[1:]]
        values = {name: rest.split("\n</parameter")[0] for name, rest in parts}
        return {name: v if v in ("x", "y") else json.loads(v) for name, v in values.items()}
    if format is ToolFormat.GLM45:
        pairs = [p.split("</arg_key>\n<arg_value>") for p in text.split("<arg_key>")[1:]]
        tagged = {name: rest.split("</arg_value>")[0] for name, rest in pairs}
        return {name: v if v in ("x", "y") else json.loads(v) for name, v in tagged.items()}
    if format is ToolFormat.SEED_OSS:
        found = re.findall(r"<parameter=(.)>(.*)</", text)
        return {name: v if v in ("x", "y") else json.loads(v) for name, v in found}
    if format in (ToolFormat.MINIMAX_M2, ToolFormat.DEEPSEEK_V32):
        found = re.findall(r'parameter name="(.)"(?: string="(?:true|false)")?>(.*)</', text)
        return {name: v if v in ("x", "y") else json.loads(v) for name, v in found}
    if format is ToolFormat.GEMMA4:
        text = re.sub(r"([abcd]):", r'"\1": ', text.replace('<|"|>', '"')).replace("f{", "{")
    call = text[text.index("{") :]
    found, _ = json.JSONDecoder().raw_decode(call)
    if "name" in found:
        found = found.get("arguments", found.get("parameters"))
    assert isinstance(found, dict)
    return found


def test_non_identifier_parameter_is_left_out_or_refused() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a-b": {"type": "integer"}}}
    optional = grammar_of(ToolFormat.PYTHONIC, {"name": "f", "parameters": schema})
    assert allows(optional, "[f()]")
    needed = {"name": "f", "parameters": schema | {"required": ["a-b"]}}
    with pytest.raises(Unsupported, match="'a-b' cannot be a parameter's name"):
        grammar_of(ToolFormat.PYTHONIC, needed)


def test_arguments_are_held_to_their_schema_exactly() -> None:
    schema = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    grammar = grammar_of(ToolFormat.LLAMA3_JSON, {"name": "f", "parameters": schema})
    for arguments, is_valid in (
        ('{"day": "2024-02-29", "more": 1}', True),
        ('{"day": "2023-02-29"}', False),
        ('{"\\u0064ay": 1}', False),
    ):
        assert allows(grammar, f'{{"name": "f", "parameters": {arguments}}}') == is_valid


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"pattern": "(?=x)"}, "tools: not supported in a pattern"),
        (nested(900), "tools: is nested too deeply; use fewer levels"),
        ({"default": 10**5000}, "tools: is no JSON Schema that can be followed"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(schema: dict[str, Any], says: str) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    offered = tools({"name": "f", "parameters": parameters})
    with pytest.raises(InvalidValue) as refused:
        demanded_calls(offered, Parsing(tools=ToolFormat.HERMES), {})
    assert (str(refused.value)[: len(says)], refused.value.param) == (says, "tools")


@pytest.mark.parametrize("format", [ToolFormat.PYTHONIC, ToolFormat.QWEN3_CODER, ToolFormat.GLM45])
def test_definitions_that_parameters_repeat_are_bounded(
    format: ToolFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused before they are repeated: 50 kB would become 50 MB."""
    parameters = {
        "type": "object",
        "properties": {f"p{number}": {} for number in range(1000)},
        "$defs": {f"d{number}": {"type": "string"} for number in range(1000)},
    }
    monkeypatch.delattr(argument_rules, "exact")
    with pytest.raises(InvalidValue, match="tools: must have at most 131072 characters"):
        demanded_calls(
            tools({"name": "f", "parameters": parameters}), Parsing(tools=format), mark_ids()
        )


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}, "minItems": 1, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": ["array", "null"], "items": {"type": "string", "enum": ["x", "y"]}},
        "more": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["rows"],
    "additionalProperties": False,
    "$defs": {
        "row": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


def test_gemma_s_nested_values_are_written_as_its_own() -> None:
    function = {"name": "f", "parameters": NESTED}
    grammar = grammar_of(ToolFormat.GEMMA4, function)
    for arguments, is_valid in (
        ('rows:[{name:<|"|>a,"}]<|"|>,n:3},{name:<|"|><|"|>}]', True),
        ('rows:[{name:<|"|>a<|"|>}],note:null,tags:[<|"|>x<|"|>,<|"|>y<|"|>]', True),
        ('rows:[{name:<|"|>a<|"|>}],note:<|"|>b<|"|>,tags:null,more:{"k": 1}', True),
        ("rows:[]", False),
        ('rows:[{name:<|"|>a<|"|>},{name:<|"|>a<|"|>},{name:<|"|>a<|"|>}]', False),
        ('rows:[{name:<|"|>a<|"|>}],tags:[<|"|>z<|"|>]', False),
    ):
        text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
        assert allows(grammar, text) == is_valid, arguments
        parser = parser_of(Parsing(tools=ToolFormat.GEMMA4))
        (call,) = gathered(parser.feed(text) + parser.flush()).calls
        assert valid(call.arguments, NESTED) == is_valid
        assert ('"k": 1' in arguments) == ('"more": {"k": 1}' in call.arguments)


def test_gemma_s_own_values_are_not_written_as_json() -> None:
    grammar = grammar_of(ToolFormat.GEMMA4, {"name": "f", "parameters": NESTED})
    assert not allows(grammar, '<|tool_call>call:f{rows:[{"name": "a"}]}<tool_call|>')


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, "[1]", "[1,2]"),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
            "[1,2]",
            "[1]",
        ),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 0}, "[]", "[1]"),
        ({"type": ["string", "null"], "enum": ["a", None]}, '<|"|>a<|"|>', '<|"|>None<|"|>'),
        ({"type": "string", "pattern": "^a+$"}, '"aa"', '<|"|>b<|"|>'),
    ],
)
def test_gemma_s_values_keep_bounds(schema: dict[str, Any], right: str, wrong: str) -> None:
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    grammar = grammar_of(ToolFormat.GEMMA4, {"name": "f", "parameters": parameters})
    for value in (right, wrong):
        text = f"<|tool_call>call:f{{v:{value}}}<tool_call|>"
        assert allows(grammar, text) == (value == right), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "minItems": "x"},
        {"$ref": "#/$defs/x", "$defs": []},
    ],
)
def test_gemma_s_broken_schemas_are_refused(schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"v": schema}}
    with pytest.raises(AssertionError, match="failed to compile JSON schema"):
        matcher(grammar_of(ToolFormat.GEMMA4, {"name": "f", "parameters": parameters}))


def valid(text: str, schema: dict[str, Any]) -> bool:
    return bool(jsonschema_rs.validator_for(schema).is_valid(json.loads(text)))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_gemma_s_nested_values_are_read_back(seed: int) -> None:
    bounded = {n: one for n, one in NESTED["properties"].items() if n != "more"}
    function = {"name": "f", "parameters": NESTED | {"properties": bounded}}
    grammar = grammar_of(ToolFormat.GEMMA4, function)
    text = some_text(matcher(grammar), random.Random(seed), ('<|"|>', "]", "}", ",", "null"))
    parser = parser_of(Parsing(tools=ToolFormat.GEMMA4))
    calls = gathered(parser.feed(text) + parser.flush()).calls
    assert calls and all(valid(call.arguments, NESTED) for call in calls), text


def test_gemma_s_values_that_repeat_without_end_are_json() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    schema = {"type": "object", "properties": {"a": node}, "$defs": {"node": node}}
    grammar = grammar_of(ToolFormat.GEMMA4, {"name": "f", "parameters": schema})
    assert allows(grammar, "<|tool_call>call:f{a:{next:{next:{}}}}<tool_call|>")
    assert len(grammar) < 100_000
