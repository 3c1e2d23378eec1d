"""JSON Schemas as TypeScript, as harmony describes the tools of gpt-oss.

Descriptions and defaults are comments. What harmony does not write is left out: formats, ranges,
`anyOf`, `$ref`. Texts stand as they are, also between quotes.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

STEP = "    "  # further in: a property's type,
VARIANT_STEP = "   "  # and one of several types
MAX_INDENT = 128  # some 32 levels; each writes those below it again
SIMPLE = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def type_of(schema: Any, indent: str = "") -> str:
    """Return the type of what a schema takes; lines after the first begin with `indent`.

    Raises:
        RecursionError: it has too many levels.
    """
    if len(indent) > MAX_INDENT:
        raise RecursionError(f"{len(indent)} spaces before a line, and {MAX_INDENT} are the most")
    if isinstance(variants := of(schema, "oneOf"), list):
        return "".join(
            f"\n{indent} | {one_type(one, indent + VARIANT_STEP)}"
            + comments([*text_of(one, "description"), *default_of(one, bare=False)])
            for one in variants
        )
    kind = of(schema, "type")
    if isinstance(kind, list) and (names := [one for one in kind if isinstance(one, str)]):
        return " | ".join("number" if name == "integer" else name for name in names)
    match kind:
        case "object":
            about = "".join(f"{indent}// {text}\n" for text in text_of(schema, "description"))
            return f"{about}{{\n{''.join(properties_of(schema, indent))}{indent}}}"
        case "array" if isinstance(schema, dict) and "items" in schema:
            return f"{type_of(schema['items'], indent)}[]"
        case "array":
            return "Array<any>"
        case "string" if names := texts_of(schema, "enum"):
            return " | ".join(f'"{name}"' for name in names)
        case str():
            return SIMPLE.get(kind, "any")
    return "any"


def one_type(schema: Any, indent: str) -> str:
    """Return the type of a property or a variant, which null may be, too."""
    found = type_of(schema, indent)
    return f"{found} | null" if of(schema, "nullable") is True and "null" not in found else found


def properties_of(schema: Any, indent: str) -> Iterator[str]:
    """Yield the lines of an object's properties."""
    properties, required = of(schema, "properties"), texts_of(schema, "required")
    for name, value in properties.items() if isinstance(properties, dict) else ():
        key = f"{indent}{name}" if name in required else f"{indent}{name}?"
        for title in text_of(value, "title"):
            yield f"{indent}// {title}\n{indent}//\n"
        variants, about = of(value, "oneOf"), text_of(value, "description")
        has_variants = isinstance(value, dict) and "oneOf" in value
        if not has_variants:
            yield from (f"{indent}// {text}\n" for text in about)
        yield from examples_of(value, indent)
        if isinstance(variants, list):
            yield from variants_of(value, key, indent)
        else:
            default = comments([] if has_variants else default_of(value))
            yield f"{key}: {one_type(value, indent + STEP)},{default}\n"


def examples_of(schema: Any, indent: str) -> Iterator[str]:
    """Yield the lines of a property's examples."""
    if isinstance(examples := of(schema, "examples"), list) and examples:
        yield f"{indent}// Examples:\n"
        yield from (f'{indent}// - "{one}"\n' for one in texts_of(schema, "examples"))


def variants_of(schema: Any, key: str, indent: str) -> Iterator[str]:
    """Yield the lines of a property of one of several types, each with its comments.

    A description stands once: before the property, or behind the first type where both are equal.
    """
    variants: list[Any] = of(schema, "oneOf")
    about = text_of(schema, "description")
    before = [] if variants and about == text_of(variants[0], "description") else about
    yield from (f"{indent}// {text}\n" for text in [*before, *default_of(schema)])
    yield f"{key}:\n"
    for place, one in enumerate(variants):
        described = text_of(one, "description")
        if described == about or (before and place == 0):
            described = []
        comment = comments([*described, *default_of(one)])
        yield f"{indent} | {one_type(one, indent + VARIANT_STEP)}{comment}\n"
    yield f"{indent},\n"


def comments(texts: list[str]) -> str:
    """Return what stands behind a type: a comment of some texts, or nothing."""
    return f" // {' '.join(texts)}" if texts else ""


def default_of(schema: Any, bare: bool = True) -> list[str]:
    """Return a schema's default as a comment, if there is one; those of enums are `bare` texts."""
    if not isinstance(schema, dict) or "default" not in schema:
        return []
    default = schema["default"]
    is_enum = isinstance(names := of(schema, "enum"), list) and bool(names)
    if isinstance(default, str) and not is_enum:
        return [f'default: "{default}"']
    if isinstance(default, str) and bare:
        return [f"default: {default}"]
    return [f"default: {msgspec.json.encode(default).decode()}"]


def of(schema: Any, keyword: str) -> Any:
    """Return the value of a keyword; a schema may be true or false and have none."""
    return schema.get(keyword) if isinstance(schema, dict) else None


def text_of(schema: Any, keyword: str) -> list[str]:
    """Return the text of a keyword, if it has one."""
    return [text] if isinstance(text := of(schema, keyword), str) else []


def texts_of(schema: Any, keyword: str) -> list[str]:
    """Return the texts in the list of a keyword."""
    values = of(schema, keyword)
    return [one for one in values if isinstance(one, str)] if isinstance(values, list) else []
