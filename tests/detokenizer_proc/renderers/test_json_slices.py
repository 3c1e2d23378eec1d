"""A body in slices is the body."""

from array import array
from typing import Any

import msgspec
import pytest

from headrace.detokenizer_proc.renderers.json_slices import MAX_ITEMS, NUMBERS, LazyList, slices

ITEMS = [{"a": i, "b": [i, None, 'é\n"']} for i in range(50)]
NUMBER_LISTS = [list(range(count)) for count in (0, 1, NUMBERS, NUMBERS + 1)]
LAZY = {
    "empty": {},
    "none": LazyList([], str),
    "items": LazyList(ITEMS, lambda item: item),
    "deep": LazyList(range(3), lambda i: {"i": i, "more": LazyList(ITEMS, lambda x: x)}, True),
    "numbers": [array("I", numbers) for numbers in NUMBER_LISTS],
    "list": [1.5, True, None, "x", [], {}],
}
EAGER = {
    "empty": {},
    "none": [],
    "items": ITEMS,
    "deep": [{"i": i, "more": ITEMS} for i in range(3)],
    "numbers": NUMBER_LISTS,
    "list": [1.5, True, None, "x", [], {}],
}


@pytest.mark.parametrize("num_bytes", [1, 100, 1 << 20])
def test_slices_are_the_bytes_of_the_whole_body(num_bytes: int) -> None:
    found = list(slices(LAZY, num_bytes))
    assert b"".join(found) == msgspec.json.encode(EAGER)
    assert all(len(slice) >= num_bytes for slice in found[:-1])
    assert len(found[-1]) < num_bytes


class Tagged(msgspec.Struct, tag="tagged", tag_field="type"):
    items: list[int]
    absent: str | msgspec.UnsetType = msgspec.UNSET
    name: str = "x"


@pytest.mark.parametrize("num_items", [0, MAX_ITEMS, MAX_ITEMS + 1])
def test_long_lists_of_structs_are_sliced(num_items: int) -> None:
    body = Tagged(list(range(num_items)))
    found = list(slices({"body": body}, 16))
    assert b"".join(found) == msgspec.json.encode({"body": body})
    assert len(max(found, key=len)) < 32 or num_items <= MAX_ITEMS


class Nested(msgspec.Struct):
    lazy: list[Tagged]
    struct: Tagged


def test_lazy_lists_within_structs_are_encoded() -> None:
    items: Any = LazyList(range(3), lambda count: Tagged(list(range(count))), True)
    numbers: Any = LazyList(range(3), int)
    body = Nested(items, Tagged(numbers))
    whole = Nested([Tagged(list(range(count))) for count in range(3)], Tagged([0, 1, 2]))
    assert b"".join(slices(body)) == msgspec.json.encode(whole)
