"""JSON Schemas to test with, small enough that a text that follows one ends soon."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

names = st.text("abcxyz_", min_size=1, max_size=6)
constants = st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab "\\é😀\n', max_size=4)


def between(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    """Return strategies of a smallest and a largest number."""
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(
        lambda pair: (min(pair), max(pair))
    )


leaves: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
    between(-50, 50).map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[1]}),
    between(-50, 50).map(lambda b: {"type": "number", "minimum": b[0], "maximum": b[1]}),
    st.integers(2, 9).map(lambda n: {"type": "integer", "multipleOf": n, "maximum": 99}),
    between(0, 8).map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]}),
    st.sampled_from(["^[a-z]{2,4}$", "^(yes|no)$", "^[0-9]{3}-[A-F]+$", "a.c"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 9}
    ),
    st.sampled_from(["date", "time", "ipv4", "uuid"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    constants.map(lambda value: {"const": value}),
    st.lists(constants, min_size=1, max_size=4).map(lambda values: {"enum": values}),
)


def nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    """Return strategies of what holds other schemas."""
    arrays = st.builds(
        lambda items, b: {"type": "array", "items": items, "minItems": b[0], "maxItems": b[1]},
        inner,
        between(0, 3),
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {
            "type": "array",
            "prefixItems": items,
            "items": False,
            "minItems": len(items),
        }
    )
    return st.one_of(
        arrays,
        tuples,
        objects(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas}),
    )


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    """Return an object schema; some of its properties are required."""
    properties = draw(st.dictionaries(names, inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


schemas = st.recursive(leaves, nested, max_leaves=8)


# Schemas that leave more open: what is said in them may hold for some types only, or not at all.
open_leaves: st.SearchStrategy[Schema] = st.one_of(
    leaves,
    st.just({}),
    between(-3, 3).map(lambda b: {"minimum": b[0], "exclusiveMaximum": b[1] + 0.5}),
    st.sampled_from([0.1, 0.5, 3, 12]).map(lambda n: {"type": "integer", "multipleOf": n}),
    st.sampled_from(["^.$", "a", r"^\d+[^a-c]?$", r"^[\w.-]*$", "^(?:x|yy)+$"]).map(
        lambda pattern: {"pattern": pattern}
    ),
    st.sampled_from(["date", "date-time", "ipv6", "ipv4"]).map(lambda name: {"format": name}),
    st.sampled_from([{"minProperties": 1}, {"maxProperties": 1}, {"required": ["a"]}]),
)


def open_nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    """Return strategies of schemas that contain others and leave out some keywords."""
    lists = st.lists(inner, min_size=1, max_size=2)
    some_names = st.dictionaries(st.sampled_from("abxé"), inner, max_size=3)
    optional = {
        "properties": some_names,
        "required": st.lists(st.sampled_from("abx"), max_size=2, unique=True),
        "additionalProperties": inner | st.booleans(),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "^n_"]), inner, max_size=1),
        "prefixItems": lists,
        "items": inner | st.booleans(),
        "additionalItems": st.booleans(),
        "maxItems": st.integers(0, 3),
        "allOf": lists,
        "anyOf": lists,
        "oneOf": lists,
    }
    kinds = {"type": st.sampled_from(["object", "array", ["object", "array", "string"]])}
    return st.one_of(
        st.fixed_dictionaries(kinds, optional=optional),
        st.fixed_dictionaries({}, optional=optional),
    )


open_schemas = st.recursive(open_leaves, open_nested, max_leaves=6)
