"""Each keyword of JSON Schema that is accepted means what it says, as with `jsonschema`."""

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from headrace.config.model_card import find_demo_model, read_gguf
from headrace.model.grammar_compiler import GrammarCompiler
from headrace.model.tokenizer_json import read_tokenizer_json
from headrace.tokenizer_proc.grammar.grammar_checker import grammar_of
from headrace.tokenizer_proc.requests.constraints import of_schema

# By keyword: a schema, then what is to be told apart by it.
CASES: dict[str, tuple[Any, list[Any]]] = {
    "type": ({"type": "integer"}, [1, -7, 1.5, "1", True, None, [], {}]),
    "types": ({"type": ["string", "null"]}, ["", None, 0, False, []]),
    "number": ({"type": "number"}, [0, -1.25, 1e21, "1", None]),
    "const": ({"const": {"a": [1, None]}}, [{"a": [1, None]}, {"a": [1]}, {}, None]),
    "enum": ({"enum": ["red", 5, None, [1]]}, ["red", 5, None, [1], "re", 6, [], "redd"]),
    "minimum": ({"type": "number", "minimum": -1.5}, [-1.5, -1.6, 0, -2, 100.25]),
    "maximum": ({"type": "integer", "maximum": 12}, [12, 13, -99, 120]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, [3, 4, -4]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 3}, [3, 2.99, 3.01]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [0, 7, 14, -21, 8, 1]),
    "minLength": ({"type": "string", "minLength": 2}, ["", "a", "ab", "é😀", "😀"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["", "ab", "é😀", "abc", '"\\']),
    "pattern": ({"type": "string", "pattern": "^a+b?$"}, ["a", "aab", "b", "", "aabb"]),
    "pattern anywhere": ({"type": "string", "pattern": "b.d"}, ["abcd", "bcd", "bd", "x"]),
    "format date": ({"type": "string", "format": "date"}, ["2024-02-29", "2024-2-9", "x"]),
    "format uuid": (
        {"type": "string", "format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000", "123e4567"],
    ),
    "format ipv4": ({"type": "string", "format": "ipv4"}, ["127.0.0.1", "256.0.0.1", "1.2.3"]),
    "items": ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2], ["a"], [1, None]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
        [["a", 1], ["a"], ["a", 1, None], [1], ["a", "b"]],
    ),
    "items false": (
        {"type": "array", "prefixItems": [{"const": 1}], "items": False},
        [[1], [], [1, 2], [2]],
    ),
    "minItems": ({"type": "array", "minItems": 2}, [[], [1], [1, 2], [1, 2, 3]]),
    "maxItems": ({"type": "array", "maxItems": 1}, [[], [1], [1, 2]]),
    "properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}},
        [{}, {"a": 1}, {"a": 1, "b": None}, {"a": "1"}, {"b": 2}, {"c": "free"}],
    ),
    "required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
        [{"b": 1}, {"a": 1}, {}, {"a": 1, "b": 2}],
    ),
    "additionalProperties false": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
    ),
    "additionalProperties": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"x": 1}, {"x": "1"}],
    ),
    "patternProperties": (
        {
            "type": "object",
            "patternProperties": {"^n_": {"type": "integer"}},
            "additionalProperties": False,
        },
        [{}, {"n_a": 1}, {"n_a": "1"}, {"m": 1}],
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, [{}, {"a": 1}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}, {"a": 1, "b": 2}]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None, "a", 1.5]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None, "a"]),
    "oneOf by a property": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "v": {"type": type}},
                    "required": ["kind", "v"],
                    "additionalProperties": False,
                }
                for kind, type in (("i", "integer"), ("s", "string"))
            ]
        },
        [{"kind": "i", "v": 1}, {"kind": "s", "v": "x"}, {"kind": "i", "v": "x"}, {"kind": "x"}],
    ),
    "allOf": (
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        [2, 3, 5, 6, "4"],
    ),
    "$ref": (
        {"$ref": "#/$defs/pair", "$defs": {"pair": {"type": "array", "maxItems": 2}}},
        [[], [1, 2], [1, 2, 3], {}],
    ),
    "$ref to itself": (
        {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "additionalProperties": False,
        },
        [{}, {"next": {"next": None}}, {"next": {"next": 1}}, {"other": {}}],
    ),
    "sibling keys": (
        {"type": "object", "required": ["a"], "anyOf": [{"properties": {"a": {"const": 1}}}]},
        [{"a": 1}, {"a": 2}, {}],
    ),
    "annotations": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "t",
            "description": "d",
            "default": 1,
            "examples": [1],
            "deprecated": True,
            "type": "integer",
        },
        [1, "a"],
    ),
}


@functools.cache
def compiler() -> GrammarCompiler:
    model = find_demo_model()
    assert model is not None
    card = read_gguf(model)
    return GrammarCompiler(card.path, card.vocab_size, card.eos_token_ids)


@functools.cache
def tokenizer() -> Tokenizer:
    model = find_demo_model()
    assert model is not None
    return Tokenizer.from_buffer(read_tokenizer_json(Path(model)))


def follows(text: str, schema: Any) -> bool:
    """Whether a text can be generated under a schema."""
    grammar = grammar_of(of_schema(json.dumps(schema), r"\s+"))
    matcher = compiler().compile(grammar)
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("keyword", CASES)
def test_a_keyword_means_what_the_standard_says(keyword: str) -> None:
    schema, values = CASES[keyword]
    is_valid = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.FormatChecker()
    ).is_valid
    expected = [value for value in values if is_valid(value)]
    assert 0 < len(expected) < len(values)
    for indent in (None, 2):
        texts = [json.dumps(value, indent=indent, ensure_ascii=False) for value in values]
        found = [value for value, text in zip(values, texts, strict=True) if follows(text, schema)]
        assert found == expected


def test_properties_come_in_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}}
    assert follows('{"a": 1, "b": 2}', schema)
    assert not follows('{"b": 2, "a": 1}', schema)
