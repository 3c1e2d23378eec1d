"""Nothing is written under a schema that is not valid."""

import json
import random
from datetime import date, datetime
from typing import Any

import jsonschema
import pytest
from grammars import allows, matcher, some_text
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import Schema, open_schemas

from headrace.tokenizer_proc.grammar import exact_schemas
from headrace.tokenizer_proc.grammar.exact_schemas import (
    DRAFT_7,
    MAX_EXACT,
    exact,
    exact_source,
    texts_of,
)
from headrace.tokenizer_proc.grammar.grammar_checker import grammar_of
from headrace.tokenizer_proc.requests.constraints import of_schema

TEXT = {"type": "string"}
NUMBER = {"type": "number"}
WHOLE = {"type": "integer"}
PET = {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}
TWO = {"a": TEXT, "b": NUMBER}
FORMATS = jsonschema.FormatChecker(formats=("ipv4", "ipv6", "uuid"))
for name, read in (("date", date.fromisoformat), ("date-time", datetime.fromisoformat)):
    FORMATS.checks(name, ValueError)(
        lambda value, read=read: not isinstance(value, str) or bool(read(value.upper()))
    )


def follows(text: str, schema: Schema, closed: bool = False) -> bool:
    """Whether a text may be written under a schema."""
    constraint = of_schema(schema, "", closed)
    return allows(grammar_of(constraint), text)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"type": "object", "properties": TWO},
            ['{"a":"x","b":1,"c":{}}', '{"\\n":1}', "{}"],
            ['{"\\u0061":1}', '{"a":"x","\\u0061":1}', '{"a":"x","a":"y"}', '{"b":"x"}'],
        ),
        (
            {"type": "object", "properties": TWO, "additionalProperties": WHOLE},
            ['{"a":"x","c":1,"":2,"ab":3}', '{"é":1}'],
            ['{"c":"x"}', '{"\\u0061":1}', '{"a":1}'],
        ),
        (
            {"type": "object", "properties": {"\n": TEXT, "a\n": TEXT}},
            ['{"\\n":"x","b":1}', '{"a":1}'],
            ['{"\\u000a":1}', '{"a\\u000A":1}', '{"\\n":1}'],
        ),
        (
            {"type": "object", "patternProperties": {"^n_": WHOLE}, "required": ["x", "n_1"]},
            ['{"x":"","n_1":1,"n_2":2}'],
            ['{"x":"","n_1":"1"}', '{"x":"","n_1":1,"\\u006e_2":"2"}', '{"n_1":1}'],
        ),
        (
            {"allOf": [{"properties": {"a": TEXT}}, {"properties": {"b": WHOLE}}]},
            ['{"a":"x","b":1,"c":null}', "1"],
            ['{"a":"x","b":"1"}', '{"\\u0062":"1"}'],
        ),
        (
            {"allOf": [{"properties": {"a": TEXT}}, {"additionalProperties": WHOLE}]},
            ['{"c":1}', "[]"],
            ['{"c":"1"}', '{"a":"x"}', '{"a":1}'],
        ),
        (
            {
                "properties": {"a": TEXT},
                "anyOf": [{"required": ["a"]}],
                "additionalProperties": WHOLE,
            },
            ['{"a":"x","c":1}'],
            ['{"a":"x","c":"1"}', '{"c":1}'],
        ),
        (
            {"prefixItems": [TEXT], "additionalItems": False},
            ['["a",1]', "[]", "{}"],
            ["[1]"],
        ),
        ({"pattern": "^a", "format": "date"}, ["1"], ['"a"', '"2024-01-01"']),
        (
            {"type": "string", "format": "hostname"},
            ['"a.b"', json.dumps(".".join(["a" * 49] * 5))],
            ['"a..b"', json.dumps(".".join(["a" * 59] * 5))],
        ),
        ({"const": {"b": MAX_EXACT}}, ['{"b":9007199254740992}'], ['{"b":9007199254740993}']),
        (
            {"examples": [{"pattern": "("}], "default": {"minProperties": 9}, "type": "integer"},
            ["1"],
            ['"a"'],
        ),
    ],
)
def test_a_schema_allows_what_is_valid_and_nothing_else(
    schema: Schema, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if follows(text, schema)] == right
    assert [text for text in wrong if follows(text, schema)] == []


def test_objects_may_be_closed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object"}, "b": {"properties": TWO}}}
    assert follows('{"c":1}', schema)
    assert not follows('{"c":1}', schema, closed=True)
    assert follows('{"a":{"c":1},"b":{"a":"x"}}', schema, closed=True), "as with vLLM"
    assert not follows('{"b":{"c":1}}', schema, closed=True)
    assert follows('{"c":1}', schema | {"additionalProperties": WHOLE}, closed=True)


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {
    "type": "object",
    "properties": {"kind": {"enum": ["dog", "wolf"]}, "pack": {"type": "array", "items": PET}},
    "required": ["kind"],
}


def test_one_of_that_a_property_discriminates_is_followed() -> None:
    schema = {**PET, "$defs": {"Cat": CAT, "Dog": DOG}}
    assert follows('{"kind":"cat"}', schema)
    assert follows('{"kind":"dog","pack":[{"kind":"wolf"},{"kind":"cat"}]}', schema)
    assert not follows('{"kind":"cow"}', schema)
    assert not follows('{"kind":"dog","pack":[{"kind":"cow"}]}', schema)


@pytest.mark.parametrize(
    "other",
    [
        CAT,
        {**DOG, "required": []},
        {"properties": DOG["properties"], "required": ["kind"]},
        {**DOG, "properties": {"kind": {"enum": ["dog", 1]}}},
        {**DOG, "properties": {"kind": {"enum": []}}},
        {**DOG, "properties": {"kind": {}}},
        {"$ref": "#/$defs/Missing"},
        True,
    ],
)
def test_one_of_that_may_overlap_stays(other: Any) -> None:
    schema = {**PET, "$defs": {"Cat": CAT, "Dog": other}}
    assert exact(schema)["oneOf"] == PET["oneOf"]


@pytest.mark.parametrize("num_nodes", [1, 100])
def test_one_of_takes_linear_work(num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted(schema: Any) -> set[str]:
        looks.append(schema)
        return texts_of(schema)

    monkeypatch.setattr(exact_schemas, "texts_of", counted)
    names = [f"p{number}" for number in range(200)]
    listed = {name: {"const": "x"} for name in names}
    pets = {name: {"type": "object", "properties": listed, "required": names} for name in "ab"}
    refs = [{"$ref": f"#/$defs/{name}"} for name in "ab"]
    same = {"oneOf": refs * 100} if num_nodes == 1 else {"oneOf": refs}
    schema = {"properties": {str(n): same for n in range(num_nodes)}, "$defs": pets}
    assert exact(schema)["properties"]["0"] == same, "it stays"
    assert len(looks) <= 2 * len(names)


def test_references_that_may_lead_elsewhere_are_not_followed() -> None:
    schema = {**PET, "$defs": {"Cat": CAT, "Dog": {**DOG, "$id": "http://localhost/dog"}}}
    assert "oneOf" in exact(schema)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"minimum": MAX_EXACT}, "minimum"),
        ({"properties": {"a": {"exclusiveMaximum": -1e30}}}, "exclusiveMaximum"),
        ({"items": [{"enum": [1, {"a": MAX_EXACT + 1}]}]}, "enum"),
        ({"const": -MAX_EXACT - 1}, "const"),
        ({"minProperties": 3, "required": ["a"]}, "minProperties above 2"),
        ({"pattern": "(?=a)"}, "pattern"),
        ({"patternProperties": {"\\Z": {}}}, "pattern"),
        ({"$schema": DRAFT_7, "items": {"contentEncoding": "base64"}}, "contentEncoding"),
        ({"$schema": f"{DRAFT_7}#", "contentMediaType": "application/json"}, "contentMediaType"),
    ],
)
def test_what_cannot_be_followed_is_named(schema: Schema, why: str) -> None:
    with pytest.raises(ValueError, match=r"^not supported in a ") as refused:
        exact(schema)
    assert why in str(refused.value)


@pytest.mark.parametrize("source", ["NaN", "[Infinity]", "{", "", "[1,]"])
def test_what_is_no_json_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expecting|value|delimiter"):
        exact_source(source)


@pytest.mark.parametrize("schema", [True, 1, [], {"properties": 1, "required": 2, "allOf": 3}])
def test_invalid_schema_is_left_to_the_compiler(schema: Any) -> None:
    exact(schema)


HINTS = ('"\\u0061"', '"a":', '"x":1', '"é"', "-1.5", "2024-02-29", "23:59:60Z", "null", "}", "]")


@settings(max_examples=150, deadline=None)
@given(schema=open_schemas, seed=st.integers(0, 2**32))
def test_what_is_written_is_valid(schema: Schema, seed: int) -> None:
    constraint = of_schema(schema, "")
    try:
        found = matcher(grammar_of(constraint))
    except (ValueError, AssertionError):
        return  # it is refused
    text = some_text(found, random.Random(seed), HINTS)
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))
