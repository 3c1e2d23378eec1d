"""Whatever the field is called, it comes to one constraint."""

import json
from typing import Any

import msgspec
import pytest

from headrace.errors import InvalidValue, RequestError, Unsupported
from headrace.tokenizer_proc.requests.constraints import (
    ANY_OBJECT,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    NO_SPACE,
    SOME_SPACE,
    Constraint,
    GrammarFields,
    constraint_of,
)

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TAG = {"type": "any_text"}
OF_SCHEMA = Constraint("json_schema", json.dumps(SCHEMA, separators=(",", ":")))


def constraint(**fields: Any) -> tuple[str, Constraint] | None:
    return constraint_of(msgspec.json.decode(json.dumps(fields), type=GrammarFields))


@pytest.mark.parametrize(
    ("fields", "param", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", ANY_OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format",
            OF_SCHEMA,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            "response_format",
            OF_SCHEMA,
        ),
        ({"guided_json": SCHEMA}, "guided_json", OF_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json", json.dumps(SCHEMA)),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", OF_SCHEMA),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            ANY_OBJECT,
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.json",
            Constraint("json_schema", "{}", NO_SPACE),
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
            "structured_outputs.json",
            Constraint("json_schema", "{}", " ?"),
        ),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.json",
            Constraint("json_schema", "{}", closed=True),
        ),
        (
            {"guided_json": {}, "guided_whitespace_pattern": "x"},
            "guided_json",
            Constraint("json_schema", "{}", "x"),
        ),
        ({"guided_regex": "a+"}, "guided_regex", Constraint("regex", "a+")),
        ({"regex": "a+"}, "regex", Constraint("regex", "a+")),
        (
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            Constraint("regex", "a"),
        ),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", Constraint("grammar", "root ::= x")),
        ({"ebnf": "root ::= x"}, "ebnf", Constraint("grammar", "root ::= x")),
        (
            {"structured_outputs": {"grammar": "start: x"}},
            "structured_outputs.grammar",
            Constraint("grammar", "start: x"),
        ),
        (
            {"guided_choice": ["a", 'b"']},
            "guided_choice",
            Constraint("lark", r'start: "a" | "b\""'),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": TAG}},
            "response_format",
            Constraint("structural_tag", '{"format":{"type":"any_text"}}'),
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}},
            "response_format",
            Constraint("structural_tag", '{"structures":[],"triggers":["a"]}'),
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            Constraint("structural_tag", "{}"),
        ),
        (
            {"structured_outputs": {"structural_tag": {"format": TAG}}},
            "structured_outputs.structural_tag",
            Constraint("structural_tag", '{"format":{"type":"any_text"}}'),
        ),
        ({"structural_tag": "{}"}, "structural_tag", Constraint("structural_tag", "{}")),
        (
            {"structured_outputs": {"choice": ["ü"]}},
            "structured_outputs.choice",
            Constraint("lark", 'start: "ü"'),
        ),
    ],
)
def test_every_spelling(fields: dict[str, Any], param: str, expected: Constraint | str) -> None:
    if isinstance(expected, str):
        expected = Constraint("json_schema", expected, SOME_SPACE)
    assert constraint(**fields) == (param, expected)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}])
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert constraint(**fields) is None


@pytest.mark.parametrize(
    ("fields", "error", "param", "text"),
    [
        ({"regex": "a", "ebnf": "b"}, InvalidValue, "ebnf", "only one field .* regex, too"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            InvalidValue,
            "structured_outputs.choice",
            r"structured_outputs\.regex, too",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_json": {}},
            InvalidValue,
            "guided_json",
            "response_format, too",
        ),
        ({"structured_outputs": {}}, InvalidValue, "structured_outputs", "one of json"),
        ({"guided_choice": []}, InvalidValue, "guided_choice", f"1 to {MAX_CHOICES}"),
        (
            {"guided_choice": ["x"] * (MAX_CHOICES + 1)},
            InvalidValue,
            "guided_choice",
            f"1 to {MAX_CHOICES}",
        ),
        (
            {"regex": "x" * (MAX_GRAMMAR_CHARACTERS + 1)},
            InvalidValue,
            "regex",
            f"at most {MAX_GRAMMAR_CHARACTERS} characters",
        ),
        (
            {"response_format": {"type": "xml"}},
            Unsupported,
            "response_format",
            "'json_schema' or 'structural_tag', not 'xml'",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            InvalidValue,
            "response_format.json_schema.schema",
            "must be there",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    fields: dict[str, Any], error: type[RequestError], param: str, text: str
) -> None:
    with pytest.raises(error, match=text) as refused:
        constraint(**fields)
    assert refused.value.param == param
    assert str(refused.value).startswith(param.split(".")[0])
