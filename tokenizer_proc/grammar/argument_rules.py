"""Rules of the arguments of a call in llguidance's Lark: JSON values, and lists of them by name."""

import json
import keyword
from collections.abc import Callable
from typing import Any

from headrace.errors import Unsupported
from headrace.tokenizer_proc.grammar.exact_schemas import exact
from headrace.tokenizer_proc.requests.constraints import quoted

Schema = dict[str, Any]

# As `json.dumps` writes, and models were taught; free spaces would go on for ever.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
DEFINITIONS = ("$defs", "definitions")


def json_value(schema: Schema, spacing: Schema = SPACING) -> str:
    """Return what a value under a schema is.

    Raises:
        ValueError, RecursionError: the schema has what cannot be followed.
    """
    exactly = {**exact(schema), "x-guidance": spacing}
    return "%json " + json.dumps(exactly, ensure_ascii=False)


def properties_of(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Return each property of an object, its schema, and whether it has to be there."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return []
    needed = required if isinstance(required, list) else []
    shared = {name: schema[name] for name in DEFINITIONS if name in schema}
    return [
        (name, shared | one if isinstance(one, dict) else shared, name in needed)
        for name, one in properties.items()
    ]


def listed_arguments(
    rule: str,
    schema: Schema,
    assign: str,
    separator: str,
    value_rules: Callable[[str, Schema], list[str]],
) -> list[str]:
    """Return the rules of `a=1, b=2`, where optional arguments may be left out."""
    properties = [
        (name, one, is_needed)
        for name, one, is_needed in properties_of(schema)
        if is_needed or is_python_name(name)
    ]
    rules = [f"{rule}: {rule}_first0"]
    for index, (name, one, is_needed) in enumerate(properties):
        if not is_python_name(name):
            raise Unsupported(
                f"tools: '{name}' cannot be a parameter's name in this format", "tools"
            )
        item, more = f"{rule}_item{index}", f"{rule}_more{index + 1}"
        skipped = "" if is_needed else f" | {rule}_first{index + 1}"
        rules += [
            f"{item}: {quoted(name + assign)} {rule}_value{index}",
            *value_rules(f"{rule}_value{index}", one),
            f"{rule}_first{index}: {item} {more}{skipped}",
            f"{rule}_more{index}: ({quoted(separator)} {item}){'' if is_needed else '?'} {more}",
        ]
    num = len(properties)
    return [*rules, f'{rule}_first{num}: ""', f'{rule}_more{num}: ""']


def is_python_name(name: str) -> bool:
    """Whether an argument may be called so."""
    return name.isidentifier() and not keyword.iskeyword(name)
