"""Validation errors for the types of a request's fields, in words of this server. Pure.

msgspec's texts are translated here, so none of them reaches a client. Their forms are those of
msgspec 0.22, `src/msgspec/_core.c`. https://github.com/jcrist/msgspec
"""

import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from msgspec import inspect

MAX_SHOWN = 80  # characters of what the client wrote
MAX_DIGITS = 4300  # of an integer, msgspec's limit and Python's
MAX_LOGGED = 400  # characters of what msgspec says
REQUIRED = "is required"
UNKNOWN = "does not have the type that is accepted here; see /openapi.json"

PLACE = re.compile(r" - at `(?:(?P<key>key)` in `)?(?P<path>\$.*)`$", re.DOTALL)
STEP = re.compile(r"\.([^.\[]+)|(\[\d+\])|(\[\.\.\.\])")
ANY_ENTRY = "[...]"  # in a path, a value of an object whose keys are free

NAMES = {
    "null": "null",
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "decimal": "a decimal number",
    "str": "a string",
    "bytes": "base64 in a string",
    "array": "an array",
    "object": "an object",
    "date": "a date",
    "time": "a time",
    "datetime": "a date and time",
    "duration": "a duration",
    "uuid": "a UUID",
}
GIVEN = NAMES | {"float": "a decimal number"}  # 1.5 where an integer is accepted, and 1.0
BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
UNITS = {"str": "character", "bytes": "byte"}  # of lengths in errors; others have items


class Fault(NamedTuple):
    """A field that is refused. `what` follows its name: "must be ...".

    Args:
        where: the path of the field, as `messages[0].content`; empty is the whole value.
        is_known: whether `what` says more than that the type is wrong.
    """

    where: str
    what: str
    is_known: bool = True

    def described(self, whole: str) -> str:
        """Return the fault in a sentence; `whole` is what the whole value is called."""
        return f"{self.where}: {self.what}" if self.where else f"{whole} {self.what}"


def named(types: str) -> str:
    """Return types that msgspec lists as a choice in words."""
    return listed([NAMES.get(one, "another type") for one in types.split(" | ")])


def listed(words: list[str]) -> str:
    """Return words as `a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def counted(kind: str, bound: str, num: str, most: str | None = None, got: str = "") -> str:
    """Return how long something must be: `bound` is "at least ", "at most " or empty."""
    unit = UNITS.get(kind, "item") + ("" if (most or num) == "1" else "s")
    span = f"{num} to {most}" if most else num
    return f"must have {bound}{span} {unit}{f', not {got}' if got else ''}"


# What msgspec says, without the place, and what that is here; groups are passed on.
FORMS: list[tuple[str, Callable[..., str]]] = [
    (
        r"Expected `([^`]*)`, got `([^`]*)`",
        lambda types, got: f"must be {named(types)}, not {GIVEN.get(got, 'another type')}",
    ),
    (r"Expected `([^`]*)`", lambda types: f"must be {named(types)}"),
    (
        r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)",
        lambda sign, bound: f"must be {BOUNDS[sign]} {bound}",
    ),
    (
        r"Expected `(?:int|float)` that's a multiple of (\S+)",
        lambda number: f"must be a multiple of {number}",
    ),
    (
        r"Expected `(\w+)` of length (>=|<=) (\d+)",
        lambda kind, sign, num: counted(kind, f"{BOUNDS[sign]} ", num),
    ),
    (r"Expected `(\w+)` of length ()(\d+)(?: to (\d+))?(?:, got (\d+))?", counted),
    (
        r"Expected `(\w+)` of (at least |at most )length (\d+)(?:, got (\d+))?",
        lambda kind, bound, num, got: counted(kind, bound, num, None, got),
    ),
    (r"Expected `str` matching regex .(.*).", lambda pattern: f"must match the pattern {pattern}"),
    (
        r"Expected `(\w+)` with (a|no) timezone component",
        lambda kind, one: f"must be {named(kind)} with {one} time zone",
    ),
    (r"Integer value out of range", lambda: f"must have at most {MAX_DIGITS} digits"),
    (r"Number out of range", lambda: "must be between -1.7e308 and 1.7e308"),
    (r"Duration is out of range|Timestamp is out of range ?", lambda: "must be nearer to 0"),
    (
        r"Invalid RFC3339 encoded (\w+)",
        lambda kind: f"must be {named(kind)}, as RFC 3339 writes it",
    ),
    (
        r"Invalid ISO8601 duration|Only units 'D', 'H', 'M', and 'S' are supported .*",
        lambda: "must be a duration of days, hours, minutes and seconds, as ISO 8601 writes it",
    ),
    (r"Invalid UUID(?: bytes)?", lambda: "must be a UUID"),
    (r"Invalid base64 encoded string", lambda: "must be base64"),
    (r"Invalid decimal string", lambda: "must be a decimal number"),
    (
        r"Invalid epoch timestamp|Invalid MessagePack timestamp(?:: .*)?",
        lambda: "must be a timestamp",
    ),
]
COMPILED = [(re.compile(form, re.DOTALL), own) for form, own in FORMS]
MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
UNEXPECTED = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
NO_CHOICE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)

# Of JSON that cannot be read, without the byte.
SYNTAX = {
    "Input data was truncated": "it ends too early",
    "trailing comma in array": "an array ends with a comma",
    "trailing comma in object": "an object ends with a comma",
    "trailing characters": "there is something behind its end",
    "object keys must be strings": "a key must be a string in double quotes",
    "expected ':'": "there must be ':' behind a key",
    "expected ',' or ']'": "there must be ',' or ']' behind an entry",
    "expected ',' or '}'": "there must be ',' or '}' behind an entry",
    "invalid number": "a number is not written as JSON has it",
    "invalid character": "there is a character that cannot be there",
    "invalid escape character in string": "a string has an escape that JSON does not know",
    "invalid character in unicode escape": "'\\u' must have four hexadecimal digits behind it",
    "unexpected end of hex escape": "'\\u' must have four hexadecimal digits behind it",
    "invalid utf-16 surrogate pair": "a string has half of a surrogate pair",
    "unexpected end of escaped utf-16 surrogate pair": "a string has half of a surrogate pair",
}
MALFORMED = re.compile(r"(?:JSON is malformed: )?(.*?)(?: \(byte (\d+)\))?", re.DOTALL)


def fault_of(text: str, kind: Any = None) -> Fault:
    """Return the fault in msgspec's text of a ValidationError.

    Args:
        text: of the error.
        kind: the type that was decoded; its choices are in the text.
    """
    place = PLACE.search(text)
    what = text[: place.start()] if place else text
    path = place["path"].removeprefix("$") if place else ""
    where = shown_path(path)
    for form in (MISSING, UNEXPECTED):
        name = form.fullmatch(what)
        if name is not None:
            field = f"{where}.{cut(name[1])}".removeprefix(".")
            return Fault(field, REQUIRED if form is MISSING else "is not a known field")
    found = translated(what, choices_at(kind, path) if kind is not None else [])
    if found is None:
        return Fault(where, UNKNOWN, False)
    if place and place["key"]:
        return Fault(where, f"each of its keys {found}")
    return Fault(where, f"each of its values {found}" if path.endswith(ANY_ENTRY) else found)


def translated(what: str, choices: list[str]) -> str | None:
    """Return msgspec's text without its place in words of this server; None is not known."""
    wrong = NO_CHOICE.fullmatch(what)
    if wrong is not None:
        return f"must be {listed(choices)}, not {cut(wrong[1])}" if choices else not_taken(wrong[1])
    for form, own in COMPILED:
        found = form.fullmatch(what)
        if found is not None:
            return own(*found.groups())
    return None


def not_taken(value: str) -> str:
    """Return that a value is not one of those that are accepted."""
    return f"must be another value, not {cut(value)}"


def cut(text: str) -> str:
    """Return what the client wrote, or its beginning."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def shown_path(path: str) -> str:
    """Return a path of msgspec's as `messages[0].content`; `*` is any key of an object."""
    while path.endswith(ANY_ENTRY):
        path = path.removesuffix(ANY_ENTRY)
    return path.replace(ANY_ENTRY, ".*").removeprefix(".")


def syntax_fault(text: str) -> str:
    """Return the fault and position of JSON that msgspec cannot read; "" if unknown."""
    parts = MALFORMED.fullmatch(text)
    assert parts is not None  # all of it may be the first group
    why = SYNTAX.get(parts[1], "")
    return f"{why}, at byte {parts[2]}" if why and parts[2] else why


@cache
def described(kind: Any) -> inspect.Type:
    """Return the description of a type."""
    return inspect.type_info(kind)


def choices_at(kind: Any, path: str) -> list[str]:
    """Return the texts and numbers that may be at a path, where those are listed."""
    types = list(alternatives([described(kind)]))
    for name, _, _ in STEP.findall(path):
        types = list(alternatives(inner for one in types for inner in inside(one, name)))
    found = dict.fromkeys(repr(value) for one in types for value in constants(one))
    others = [JSON_TYPES[type(one)] for one in types if type(one) in JSON_TYPES]
    return [*found, *dict.fromkeys(others)] if found else []


def alternatives(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """Yield types, those of a union one by one."""
    for one in types:
        if isinstance(one, inspect.UnionType):
            yield from alternatives(one.types)
        else:
            yield one


def inside(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """Yield the type of a struct's field, or of the entries of a list or a dictionary."""
    match kind:
        case inspect.StructType():
            if name and name == kind.tag_field:
                yield inspect.LiteralType((kind.tag,))
            yield from (field.type for field in kind.fields if field.encode_name == name)
        case inspect.ListType() if not name:
            yield kind.item_type
        case inspect.DictType() if not name:
            yield kind.value_type


def constants(kind: inspect.Type) -> Iterator[Any]:
    """Yield the values that a type lists."""
    match kind:
        case inspect.LiteralType():
            yield from kind.values
        case inspect.EnumType():
            members: Iterable[Enum] = kind.cls
            yield from (member.value for member in members)


JSON_TYPES: dict[type[inspect.Type], str] = {
    inspect.StructType: "an object",
    inspect.DictType: "an object",
    inspect.ListType: "an array",
    inspect.NoneType: "null",
}
