"""The fields for structured output, and the one grammar that they amount to, if any.

`response_format` is OpenAI's, `structured_outputs` and `guided_*` are vLLM's, `json_schema`,
`regex` and `ebnf` SGLang's.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from headrace.errors import InvalidValue, Unsupported
from headrace.model.sampling_parameters import SamplingParameters

MAX_GRAMMAR_CHARACTERS = 1 << 17  # each sequence carries its grammar
MAX_CHOICES = 4096
ANY_OBJECT = '{"type":"object"}'
# Bounded: a model that has nothing to say goes on with spaces for ever.
SOME_SPACE = r"[ \n\r\t]{1,32}"
NO_SPACE = ""

Object = dict[str, Any]
Schema = Object | str  # JSON Schema, as JSON or as JSON in a string


class JsonSchemaFormat(msgspec.Struct):
    """`response_format.json_schema`. Schemas are kept to whether or not they are `strict`."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`."""

    type: str = "text"
    json_schema: JsonSchemaFormat | None = None
    format: Any = None  # of a structural tag; or the next two, its first shape
    structures: Any = None
    triggers: Any = None


class StructuredOutputs(msgspec.Struct):
    """`structured_outputs`: one of the first six fields is the constraint."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Object | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class GrammarFields(SamplingParameters, kw_only=True):
    """Constraint fields of any request that generates."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


NAMES = GrammarFields.__struct_fields__[len(SamplingParameters.__struct_fields__) :]
Kind = Literal["json_schema", "regex", "lark", "grammar", "structural_tag"]
# Fields whose value is what a text has to be, as it is.
SOURCES: dict[str, Kind] = {
    "guided_regex": "regex",
    "regex": "regex",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """A constraint on the text. `lark` is llguidance's syntax; `grammar` is that, or GBNF."""

    kind: Kind
    source: str
    space: str = SOME_SPACE  # a regex: what may be between the parts of JSON
    thoughts: str = ""  # rules of what comes before, as Lark has them
    closed: bool = False  # objects have no properties but those that their schemas name
    special_tokens: dict[str, int] = {}  # that are tokens in a structural tag, too
    calls: tuple[str, ...] = ()  # Lark: the text may be this instead; the first that compiles
    opening: str = ""  # rules of what comes directly before the text, but not before calls


def constraint_of(fields: GrammarFields) -> tuple[str, Constraint] | None:
    """Return the field with the constraint, and its value; None without one.

    Raises:
        InvalidValue: several fields say so, or one has no such value.
        Unsupported: a field asks for what there is not.
    """
    found = constraints(fields)
    if not found:
        return None
    param, constraint = found.popitem()
    if found:
        raise InvalidValue(
            f"{param}: only one field may say what the text has to be; there is {min(found)}, too",
            param,
        )
    size = len(constraint.source)
    if size > MAX_GRAMMAR_CHARACTERS:
        raise InvalidValue(
            f"{param}: must have at most {MAX_GRAMMAR_CHARACTERS} characters, not {size}", param
        )
    return param, constraint


def constraints(fields: GrammarFields) -> dict[str, Constraint]:
    """Return the constraint of the fields."""
    found = {}
    if fields.response_format is not None and fields.response_format.type != "text":
        found["response_format"] = of_format(fields.response_format)
    if fields.structured_outputs is not None:
        found |= of_outputs(fields.structured_outputs)
    space = fields.guided_whitespace_pattern or SOME_SPACE
    for param, schema in (("guided_json", fields.guided_json), ("json_schema", fields.json_schema)):
        if schema is not None:
            found[param] = of_schema(schema, space)
    for param, kind in SOURCES.items():
        source = getattr(fields, param)
        if source is not None:
            found[param] = Constraint(kind, source)
    if fields.guided_choice is not None:
        found["guided_choice"] = of_choice(fields.guided_choice, "guided_choice")
    return found


def of_format(wanted: ResponseFormat) -> Constraint:
    """Return what a `response_format` other than text comes to."""
    if wanted.type == "json_object":
        return Constraint("json_schema", ANY_OBJECT)
    if wanted.type == "structural_tag":
        tag = {"format": wanted.format}
        if wanted.structures is not None:
            tag = {"structures": wanted.structures, "triggers": wanted.triggers}
        return Constraint("structural_tag", msgspec.json.encode(tag).decode())
    if wanted.type != "json_schema":
        raise Unsupported(
            f"response_format: must be of type 'text', 'json_object', 'json_schema' or "
            f"'structural_tag', not '{wanted.type}'",
            "response_format",
        )
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        where = "response_format.json_schema.schema"
        raise InvalidValue(f"{where}: must be there, with type 'json_schema'", where)
    return of_schema(wanted.json_schema.schema, SOME_SPACE)


def of_outputs(outputs: StructuredOutputs) -> dict[str, Constraint]:
    """Return what `structured_outputs` comes to, by its fields."""
    space = outputs.whitespace_pattern or SOME_SPACE
    if outputs.disable_any_whitespace:
        space = NO_SPACE
    found = {}
    if outputs.json is not None:
        found["json"] = of_schema(outputs.json, space, outputs.disable_additional_properties)
    if outputs.json_object:
        found["json_object"] = Constraint("json_schema", ANY_OBJECT)
    if outputs.regex is not None:
        found["regex"] = Constraint("regex", outputs.regex)
    if outputs.grammar is not None:
        found["grammar"] = Constraint("grammar", outputs.grammar)
    if outputs.structural_tag is not None:
        found["structural_tag"] = Constraint("structural_tag", as_json(outputs.structural_tag))
    if outputs.choice is not None:
        found["choice"] = of_choice(outputs.choice, "structured_outputs.choice")
    if not found:
        raise InvalidValue(
            "structured_outputs: must have one of json, json_object, regex, choice, grammar and "
            "structural_tag",
            "structured_outputs",
        )
    return {f"structured_outputs.{name}": constraint for name, constraint in found.items()}


def of_schema(schema: Schema, space: str, closed: bool = False) -> Constraint:
    """Return what a JSON Schema comes to."""
    return Constraint("json_schema", as_json(schema), space, closed=closed)


def as_json(value: Schema) -> str:
    """Return what may be JSON in a string already."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def of_choice(choices: list[str], param: str) -> Constraint:
    """Return what a choice between texts comes to."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidValue(
            f"{param}: must have 1 to {MAX_CHOICES} entries, not {len(choices)}", param
        )
    return Constraint("lark", f"start: {' | '.join(map(quoted, choices))}")


def quoted(text: str) -> str:
    """Return a text as Lark writes it."""
    return msgspec.json.encode(text).decode()


def spelled(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return a text as Lark writes it, in which special tokens are tokens and not their letters."""
    parts = []
    while text:
        at, token = special_in(text, special_tokens)
        if at:
            parts.append(quoted(text[:at]))
        if token:
            parts.append(f"<[{special_tokens[token]}]>")
        text = text[at + len(token) :]
    return " ".join(parts)


def special_in(text: str, special_tokens: Iterable[str]) -> tuple[int, str]:
    """Return the first special token in a text and where it is; if there is none, its end."""
    found = [(at, -len(token), token) for token in special_tokens if (at := text.find(token)) >= 0]
    at, _, token = min(found, default=(len(text), 0, ""))
    return at, token
