"""Rules of values in Gemma 4's form: `{a:[<|"|>text<|"|>,1],b:{c:true}}`.

Lists, objects and strings are followed where their schemas are made of `type`, `properties`,
`items`, `anyOf` and the like. Any other schema is followed in JSON, which the reader takes, too.
"""

import json
from collections.abc import Callable

from headrace.tokenizer_proc.grammar.argument_rules import (
    DEFINITIONS,
    Schema,
    is_python_name,
    json_value,
    listed_arguments,
    properties_of,
)
from headrace.tokenizer_proc.requests.constraints import quoted

GEMMA_QUOTE = '<|"|>'
MAX_HOPS = 8  # from a reference to the next
MAX_NESTED = 200  # values within those of a tool: references may repeat them without end
NOTES = {"title", "description", "default", "examples", "$schema", *DEFINITIONS}
OF_OBJECT = {"type", "properties", "required", "additionalProperties"}
OF_LIST = {"type", "items", "minItems", "maxItems"}
OF_STRING = {"type", "enum"}
REFERENCE = "$ref"


class GemmaValues:
    """Makes the rules of one tool's arguments."""

    def __init__(
        self, root: str, quote: str, free_text: Callable[[str, str], tuple[str, str]]
    ) -> None:
        """Begin a tool.

        Args:
            root: what the names of rules begin with.
            quote: what a quote is in a grammar.
            free_text: returns the rules of any text up to an end, as `ToolGrammar` does.
        """
        self._root = root
        self._quote = quote
        self._free_text = free_text
        self._num_nested = 0

    def arguments(self, rule: str, schema: Schema) -> list[str]:
        """Return the rules of an object between its braces."""
        return listed_arguments(rule, schema, ":", ",", self._value)

    def _nested(self) -> str:
        """Return a short name of a rule within a value: values may be nested deeply."""
        self._num_nested += 1
        return f"{self._root}_nested{self._num_nested}"

    def _value(self, rule: str, schema: Schema) -> list[str]:
        """Return the rules of a value."""
        shared = {name: schema[name] for name in DEFINITIONS if name in schema}
        schema = resolved(schema)
        kinds = schema.keys() - NOTES
        options = options_of(schema)
        if self._num_nested > MAX_NESTED:
            return in_json(rule, schema)
        if options:
            names = [self._nested() for _ in options]
            pairs = zip(names, options, strict=True)
            parts = [line for name, one in pairs for line in self._value(name, shared | one)]
            return [f"{rule}: {' | '.join(names)}", *parts]
        match schema.get("type"):
            case "string" if kinds <= OF_STRING and has_plain_texts(schema):
                return self._string(rule, schema)
            case "array" if kinds <= OF_LIST and has_plain_counts(schema):
                return self._list(rule, schema, shared | schema["items"])
            case "object" if kinds <= OF_OBJECT and has_plain_names(schema):
                inner = self._nested()
                return [f'{rule}: "{{" {inner} "}}"', *self.arguments(inner, schema)]
        return in_json(rule, schema)

    def _string(self, rule: str, schema: Schema) -> list[str]:
        if "enum" in schema:
            texts = " | ".join(quoted(text) for text in schema["enum"] if isinstance(text, str))
            return [f"{rule}: {self._quote} ({texts}) {self._quote}"]
        free, rest = self._free_text(f"{rule}_text", GEMMA_QUOTE)
        written = " ".join(part for part in (self._quote, f"{rule}_text", rest) if part)
        return [f"{rule}: {written}", free]

    def _list(self, rule: str, schema: Schema, items: Schema) -> list[str]:
        fewest, most, item = schema.get("minItems", 0), schema.get("maxItems"), self._nested()
        more = f"{max(fewest - 1, 0)},{'' if most is None else most - 1}"
        some = item if most == 1 else f'{item} ("," {item}){{{more}}}'
        listed = f"({some}){'' if fewest else '?'}"
        return [f'{rule}: "[" {listed} "]"', *self._value(item, items)]


def resolved(schema: Schema) -> Schema:
    """Return a schema that is no reference to a definition beside it, where it is one."""
    kinds = schema.keys() - NOTES
    for _ in range(MAX_HOPS):
        if kinds != {REFERENCE}:
            break
        _, _, path = str(schema[REFERENCE]).partition("#/")
        group, _, name = path.partition("/")
        named = schema.get(group) if group in DEFINITIONS else None
        found = named.get(name) if isinstance(named, dict) else None
        if not isinstance(found, dict):
            break
        schema = {name: schema[name] for name in DEFINITIONS if name in schema} | found
        kinds = schema.keys() - NOTES
    return schema


def options_of(schema: Schema) -> list[Schema]:
    """Return the schemas of which a value follows any, where there are several."""
    types, options = schema.get("type"), schema.get("anyOf")
    if isinstance(types, list):
        return [schema | {"type": one} for one in types if isinstance(one, str)]
    if schema.keys() - NOTES == {"anyOf"} and isinstance(options, list):
        return options if all(isinstance(one, dict) for one in options) else []
    return []


def has_plain_texts(schema: Schema) -> bool:
    """Whether a string may be any text, or one of some."""
    texts = schema.get("enum", [""])
    return isinstance(texts, list) and any(isinstance(text, str) for text in texts)


def has_plain_counts(schema: Schema) -> bool:
    """Whether a list has items of one schema, and bounds that hold for some list but the empty."""
    fewest, most = schema.get("minItems", 0), schema.get("maxItems")
    is_bound = type(fewest) is int and fewest >= 0
    is_bound &= most is None or (type(most) is int and most >= max(fewest, 1))
    return is_bound and isinstance(schema.get("items"), dict)


def has_plain_names(schema: Schema) -> bool:
    """Whether an object has properties alone, whose names stand as they are."""
    properties = properties_of(schema)
    return bool(properties) and all(
        is_python_name(name) and isinstance(schema["properties"][name], dict)
        for name, _, _ in properties
    )


def in_json(rule: str, schema: Schema) -> list[str]:
    """Return the rule of a value in JSON, with the definitions that it may refer to."""
    alone = {name: one for name, one in schema.items() if name not in DEFINITIONS}
    return [f"{rule}: {json_value(schema if REFERENCE in json.dumps(alone) else alone)}"]
