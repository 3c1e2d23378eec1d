"""Strings of a GGUF file lie as they are until they are looked at."""

from array import array

import pytest

from headrace.errors import ModelError
from headrace.model.string_array import LENGTH, StringArray


def laid_out(*strings: bytes) -> StringArray:
    """Return an array of `strings`, as a file has it."""
    data, starts = b"", array("Q")
    for string in strings:
        data += LENGTH.pack(len(string))
        starts.append(len(data))
        data += string
    starts.append(len(data) + LENGTH.size)
    return StringArray(data, starts, "some.gguf")


def test_an_array_is_the_list_of_its_strings() -> None:
    strings = ["a", "", "Ġthe", "世界"]
    found = laid_out(*(string.encode() for string in strings))
    assert found == strings
    assert found == laid_out(*(string.encode() for string in strings))
    assert found != strings[:-1]
    assert (len(found), found[3], found[-2], found[1:3]) == (4, "世界", "Ġthe", strings[1:3])
    assert found.index("Ġthe") == 2
    with pytest.raises(IndexError):
        found[4]
    with pytest.raises(IndexError):
        found[-5]


def test_a_string_that_is_not_utf8_is_refused_when_looked_at() -> None:
    found = laid_out(b"a", b"\xff", b"b")
    assert (found[0], found[2]) == ("a", "b")
    with pytest.raises(ModelError, match=r"some\.gguf: string 1 of an array is not UTF-8"):
        list(found)
