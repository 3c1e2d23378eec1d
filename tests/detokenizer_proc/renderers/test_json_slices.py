"""A body in slices is the body."""

from array import array

import msgspec
import pytest

from headrace.detokenizer_proc.renderers.json_slices import NUMBERS, LazyList, slices

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
