"""Structural tags, xgrammar's: text of which some parts are free and some are not.

https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_api.html. What is not known here, such as
formats of tokens, is refused. SGLang's and vLLM's first shape, of `structures` and `triggers`, is
one of `triggered_tags`.
"""

from typing import Any, Literal, TypeVar

import msgspec

from headrace.tokenizer_proc.grammar.grammar_errors import tag_error

Schema = dict[str, Any] | bool
T = TypeVar("T")


class TagFormat(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """Format of a part of a text."""


class ConstString(TagFormat, tag="const_string"):
    """One text."""

    value: str


class JsonSchema(TagFormat, tag="json_schema"):
    """JSON of a schema."""

    json_schema: Schema
    style: Literal["json"] = "json"
    any_order: Literal[False] = False


class Regex(TagFormat, tag="regex"):
    """A match of an expression, which is Rust's."""

    pattern: str


class Ebnf(TagFormat, tag="grammar"):
    """A sentence of a grammar."""

    grammar: str


class AnyText(TagFormat, tag="any_text"):
    """Anything, up to what comes next."""

    excludes: list[str] = []
    max_tokens: None = None
    max_chars: None = None


class SequenceFormat(TagFormat, tag="sequence"):
    """One after another."""

    elements: list["AnyFormat"]


class AnyOfFormat(TagFormat, tag="or"):
    """One of several."""

    elements: list["AnyFormat"]


class Maybe(TagFormat, tag="optional"):
    """Once or not at all."""

    content: "AnyFormat"


class Star(TagFormat, tag="star"):
    """Any number of times."""

    content: "AnyFormat"


class Plus(TagFormat, tag="plus"):
    """Once and more."""

    content: "AnyFormat"


class Repeat(TagFormat, tag="repeat"):
    """So many times; a `max` of -1 is no bound."""

    min: int
    max: int
    content: "AnyFormat"


class Tag(TagFormat, tag="tag"):
    """Content between a begin and an end mark."""

    begin: str
    content: "AnyFormat"
    end: str | list[str]

    @property
    def ends(self) -> tuple[str, ...]:
        """Marks that may end it; without any, it ends with its content."""
        ends = [self.end] if isinstance(self.end, str) else self.end
        return tuple(dict.fromkeys(end for end in ends if end))


class TriggeredTags(TagFormat, tag="triggered_tags"):
    """Free text, but for tags: where it has a trigger, one of the tags has begun."""

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False  # a tag comes first
    stop_after_first: bool = False
    excludes: list[str] = []


class SeparatedTags(TagFormat, tag="tags_with_separator"):
    """Tags and nothing else."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


AnyFormat = (
    ConstString
    | JsonSchema
    | Regex
    | Ebnf
    | AnyText
    | SequenceFormat
    | AnyOfFormat
    | Maybe
    | Star
    | Plus
    | Repeat
    | Tag
    | TriggeredTags
    | SeparatedTags
)


class StructuralTag(msgspec.Struct):
    """`response_format`, of type `structural_tag`."""

    format: AnyFormat


class Structure(msgspec.Struct):
    """An entry of `structures`."""

    begin: str
    end: str
    schema: Schema | str = True


class Structures(msgspec.Struct):
    """The first shape."""

    structures: list[Structure]
    triggers: list[str]


def decode_tag(source: str) -> AnyFormat:
    """Return the format of a structural tag, in JSON, in either shape.

    Raises:
        ValueError: it has neither; the text says where.
    """
    if "structures" not in decoded(source, dict[str, msgspec.Raw]):
        return decoded(source, StructuralTag).format
    found = decoded(source, Structures)
    tags = [Tag(one.begin, JsonSchema(schema_of(one.schema)), one.end) for one in found.structures]
    return TriggeredTags(found.triggers, tags)


def schema_of(schema: Schema | str) -> Schema:
    """Return a schema that may be JSON in a string."""
    return decoded(schema, Schema) if isinstance(schema, str) else schema  # type: ignore[arg-type]


def decoded(source: str, kind: type[T]) -> T:
    """Return JSON as it has to be."""
    try:
        return msgspec.json.decode(source, type=kind)
    except msgspec.DecodeError as error:
        raise tag_error(error, kind) from error
