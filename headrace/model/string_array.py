"""An array of strings of a GGUF file, such as a vocabulary, as it lies in the file.

A string is decoded when it is looked at. Most processes need a vocabulary's size and ends only, and
hundreds of thousands of Python's strings leave holes that stay in memory.
"""

import struct
from array import array
from collections.abc import Sequence
from typing import overload

from headrace.errors import ModelError

LENGTH = struct.Struct("<Q")  # before each string


class StringArray(Sequence[str]):
    """Strings behind their lengths.

    Args:
        data: from the first length to the end of the last string.
        starts: of the strings, and of one more that would follow.
        name: of the file, for errors.
    """

    def __init__(self, data: bytes, starts: "array[int]", name: str) -> None:
        self._data = data
        self._starts = starts
        self._name = name

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        """Return a string.

        Raises:
            ModelError: it is not UTF-8.
        """
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        end = self._starts[place + 1] - LENGTH.size
        try:
            return self._data[self._starts[place] : end].decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._name}: string {place} of an array is not UTF-8") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list
