"""JSON Schemas rewritten so that llguidance follows them exactly.

No text under what comes out is invalid under what went in. What cannot be put so is refused.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn
from urllib.parse import unquote

from headrace.tokenizer_proc.grammar.grammar_errors import GrammarError
from headrace.tokenizer_proc.grammar.schema_formats import LENGTHS, PATTERNS
from headrace.tokenizer_proc.grammar.schema_patterns import literal, rust_pattern

Schema = dict[str, Any]

BY_NAME = ("properties", "$defs", "definitions", "dependentSchemas")  # schemas, by name
DATA = ("const", "enum", "default", "examples")  # in which nothing is a schema
NAMING = {"properties", "patternProperties", "additionalProperties"}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_EXACT = 1 << 53  # llguidance counts in doubles
ANY_NAME = ""  # a pattern, which all names have
ANY = "(?s:.)"
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Keywords whose strings may be checked in draft 7, and are annotations in later ones.
CONTENT = ("contentEncoding", "contentMediaType")
DRAFT_7 = "http://json-schema.org/draft-07/schema"


def exact_source(source: str, closed: bool = False) -> str:
    """Return a schema, in JSON, that is followed exactly.

    Args:
        closed: objects have no properties but those that their schemas name.
    Raises:
        ValueError, RecursionError: it is no JSON, or has what cannot be followed.
    """
    return json.dumps(exact(json.loads(source, parse_constant=refuse_constant), closed))


def refuse_constant(name: str) -> NoReturn:
    """Refuse what Python takes for a number and JSON does not."""
    raise GrammarError(f"not JSON: {name}")


def exact(schema: Any, closed: bool = False) -> Any:
    """Return the same of a schema that has been decoded."""
    return Rewriting(schema, closed).of(schema) if isinstance(schema, dict) else schema


class Rewriting:
    """How the schemas within one are rewritten.

    Args:
        root: what references refer to.
        closed: as with `exact_source`.
    """

    def __init__(self, root: Schema, closed: bool) -> None:
        self._root = root
        self._closed = closed
        self._refused = CONTENT if str(root.get("$schema")).startswith(DRAFT_7) else ()
        self._has_inner_ids = json.dumps(root).count('"$id":') > ("$id" in root)
        # By the identities of schemas, which are kept: many nodes may refer to the same.
        self._told_apart: dict[tuple[int, ...], tuple[bool, list[Any]]] = {}

    def of(self, node: Any) -> Any:
        """Rewrite a schema or several; values that are no schemas are left as they are."""
        if isinstance(node, list):
            return [self.of(one) for one in node]
        if not isinstance(node, dict):
            return node
        for name in self._refused:
            if name in node:
                raise GrammarError(f"not supported in a schema of draft 7: {name}")
        check_numbers(node)
        found = {key: self._value(key, value) for key, value in node.items()}
        if "prefixItems" in found:
            found.pop("additionalItems", None)  # an older draft's, and taken for a sign of that
        self._bound_names(found)
        more = [*put_string(found), *self._put_choice(found)]
        if more:
            found["allOf"] = [*as_list(found.get("allOf")), *more]
        return found

    def _value(self, key: str, value: Any) -> Any:
        """Return what a keyword has, with the schemas in it put."""
        if key in DATA:
            return value
        if key in BY_NAME and isinstance(value, dict):
            return {name: self.of(one) for name, one in value.items()}
        if key != "patternProperties" or not isinstance(value, dict):
            return self.of(value)
        found: Schema = {}
        for pattern, one in value.items():
            name = rust_pattern(pattern)
            found[name] = {"allOf": [found[name], self.of(one)]} if name in found else self.of(one)
        return found

    def _bound_names(self, node: Schema) -> None:
        """Constrain the property names that the schema does not list.

        Where any name may come, a listed one may come again in other letters, as with `\\u0061`.
        Names that have to match a pattern are written in one way only.
        """
        required = [name for name in as_list(node.get("required")) if isinstance(name, str)]
        check_count(node, len(set(required)) + 1)
        listed, patterns = node.get("properties", {}), node.get("patternProperties")
        if not node.keys() & NAMING or not isinstance(listed, dict):
            return
        others = node.pop("additionalProperties", not self._closed)
        if others is False:
            others = None
        elif patterns is not None:  # no pattern has all names that another has not
            node["properties"] = listed | {n: others for n in required if n not in listed}
        elif listed and (others is not True or any(map(CONTROL.search, listed))):
            patterns = {name_but(listed): others}
        else:
            patterns = {ANY_NAME: others}
        node.pop("patternProperties", None)
        node |= {} if patterns is None else {"patternProperties": patterns}
        node["additionalProperties"] = False  # beside the patterns, which it is about

    def _put_choice(self, node: Schema) -> Iterator[Schema]:
        """Rewrite `oneOf` as `anyOf` where a property selects one of its schemas."""
        branches = as_list(node.get("oneOf"))
        schemas = [self._referred(branch) for branch in branches]
        identities = tuple(map(id, schemas))
        if identities not in self._told_apart:
            self._told_apart[identities] = are_told_apart(schemas), schemas
        if self._told_apart[identities][0]:
            del node["oneOf"]
            yield {"anyOf": branches}

    def _referred(self, schema: Any) -> Any:
        """Return what a schema refers to, if it is within the root; else the schema."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/") or self._has_inner_ids:
            return schema
        found: Any = self._root
        for part in unquote(reference[2:]).split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        return found


def put_string(node: Schema) -> Iterator[Schema]:
    """Rewrite a string's pattern and format; yield further constraints."""
    if isinstance(node.get("pattern"), str):
        node["pattern"] = rust_pattern(node["pattern"])
    name = node.get("format")
    if isinstance(name, str) and name in PATTERNS:
        del node["format"]
        yield {"pattern": PATTERNS[name]}
    if isinstance(name, str) and name in LENGTHS:
        yield {"maxLength": LENGTHS[name]}


def are_told_apart(schemas: list[Any]) -> bool:
    """Whether a property that each of the objects must have tells which of `schemas` it follows.

    References may name one schema many times. Without those the work is linear in their JSON.
    """
    if not schemas or len(set(map(id, schemas))) < len(schemas):
        return False
    listed = [required_properties(schema) for schema in schemas]
    return any(are_disjoint(name, listed) for name in listed[0])


def are_disjoint(name: str, listed: list[Schema]) -> bool:
    """Whether a property has other texts in each of the listed ones; it ends at the first that has
    not."""
    seen = set[str]()
    for properties in listed:
        texts = texts_of(properties.get(name))
        if not texts or not seen.isdisjoint(texts):
            return False
        seen |= texts
    return True


def required_properties(schema: Any) -> Schema:
    """Return the schemas of the properties that an object must have."""
    listed = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(listed, dict) or schema.get("type") != "object":
        return {}
    required = [name for name in as_list(schema.get("required")) if isinstance(name, str)]
    return {name: listed.get(name) for name in required}


def texts_of(schema: Any) -> set[str]:
    """Return the texts that a schema allows, if it lists them; else none."""
    if not isinstance(schema, dict):
        return set()
    texts = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
    return set(texts) if all(isinstance(text, str) for text in texts) else set()


def name_but(names: Iterable[str]) -> str:
    """Return the pattern of all names but some."""
    return f"^{rest_but(set(names))}$"


def rest_but(rests: set[str]) -> str:
    """Return the pattern of all ends of names but some."""
    by_first: dict[str, set[str]] = {}
    for rest in rests - {""}:
        by_first.setdefault(rest[0], set()).add(rest[1:])
    firsts = sorted(by_first)
    other = f"[^{''.join(map(literal, firsts))}]" if firsts else ANY
    found = [f"{other}{ANY}*", *(literal(first) + rest_but(by_first[first]) for first in firsts)]
    return f"(?:{'|'.join(found)}){'' if '' in rests else '?'}"


def check_count(node: Schema, most: int) -> None:
    """Refuse an object that needs more than `most` names: one that is not listed may repeat."""
    count = node.get("minProperties")
    if isinstance(count, int | float) and count > most:
        raise GrammarError(
            f"not supported in a schema: minProperties above {most}, one more than are required"
        )


def check_numbers(node: Schema) -> None:
    """Refuse numbers that would be followed inexactly."""
    for name in BOUNDS:
        value = node.get(name)
        if isinstance(value, int | float) and abs(value) >= MAX_EXACT:
            raise GrammarError(f"not supported in a schema: {name} of 2^53 and above")
    for name in ("const", "enum"):
        if name in node and any(n > MAX_EXACT for n in integers(node[name])):
            raise GrammarError(f"not supported in a schema: integers above 2^53 in {name}")


def integers(value: Any) -> Iterator[int]:
    """Yield the absolute values of all integers in a value."""
    if isinstance(value, int):
        yield abs(value)
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from integers(one)


def as_list(value: Any) -> list[Any]:
    """Return a value that is a list; other values become []."""
    return value if isinstance(value, list) else []
