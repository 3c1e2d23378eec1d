"""Calls written as JSON: `{"name": …, "arguments": {…}}`, or the arguments alone.

Arguments are passed on as the model writes them. They are JSON if the model's are.
"""

import json
import re
import secrets
from collections.abc import Callable

from headrace.detokenizer_proc.parsers.pieces import Arguments, ToolCallStart
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource
from headrace.detokenizer_proc.parsers.value_end import Shape

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "type", "id", *ARGUMENTS)
SCALAR = re.compile(r"[\w+\-.]*")
NOTHING = "{}"

NewId = Callable[[], str]


def new_call_id() -> str:
    """Return the id of a call, in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


class Calls:
    """The calls of one answer so far."""

    def __init__(self, new_id: NewId = new_call_id) -> None:
        self._new_id = new_id
        self.num = 0

    def begin(self, name: str, id: str = "") -> ToolCallStart:
        """Begin another one, whose `id` is the model's or a new one."""
        self.num += 1
        return ToolCallStart(self.num - 1, id or self._new_id(), name)

    def more(self, text: str) -> Arguments:
        """Add to the arguments of the last one."""
        return Arguments(self.num - 1, text)


def read_arguments(source: TextSource, calls: Calls) -> Reading[bool]:
    """Pass on an object, the arguments of the last call; return whether all of it came."""
    source.settle()
    shape = Shape()
    while not shape.is_over:
        if not (yield from source.scan(shape.scan)):
            break
        if text := source.settle():
            yield calls.more(text)
    return shape.is_whole


def read_value(source: TextSource) -> Reading[str]:
    """Read a value and return its source; "" if there is none."""
    if (yield from source.peek()) not in ("{", "[", '"'):
        return (yield from source.run(SCALAR))
    shape, parts = Shape(), []
    while not shape.is_over:
        part = yield from source.scan(shape.scan)
        if not part:
            break
        parts.append(part)
    return "".join(parts) if shape.is_whole else ""


def read_string(source: TextSource) -> Reading[str | None]:
    """Read a string and return its value; None if there is none."""
    if (yield from source.peek()) != '"':
        return None
    return string_value((yield from read_value(source)))


def string_value(value: str) -> str | None:
    """Return the value of a JSON string; None for anything else."""
    try:
        found = json.loads(value, strict=False)
        return found if isinstance(found, str) and found.encode() is not None else None
    except ValueError:  # half a surrogate pair is no text, either
        return None


class CallReader:
    """One call that is an object with a name and arguments, in either order."""

    def __init__(self, source: TextSource, calls: Calls, is_strict: bool = False) -> None:
        """With `is_strict`, an object without arguments or with other keys is no call."""
        self._source = source
        self._calls = calls
        self._is_strict = is_strict
        self._name: str | None = None
        self._arguments: str | None = None  # that came before the name
        self._has_begun = False

    def read(self) -> Reading[bool]:
        """Read an object; return whether a call has begun. Later entries are unsettled.

        Where a call is whole nothing is, and where none has begun everything.
        """
        source = self._source
        if not (yield from source.has("{")):
            return False
        while True:
            if not (yield from self._entry()):
                return self._has_begun
            yield from source.run(SPACE)
            if (yield from source.has("}")):
                break
            if not (yield from source.has(",")):
                return self._has_begun
        if not self._has_begun:
            if self._name is None or (self._is_strict and self._arguments is None):
                return False
            yield self._calls.begin(self._name)
            yield self._calls.more(self._arguments or NOTHING)
        source.settle()
        return True

    def _entry(self) -> Reading[bool]:
        """Read a key and its value; return whether they are well-formed."""
        source = self._source
        yield from source.run(SPACE)
        key = yield from read_string(source)
        yield from source.run(SPACE)
        if key is None or (self._is_strict and key not in KEYS):
            return False
        if not (yield from source.has(":")):
            return False
        yield from source.run(SPACE)
        if key == "name" and self._name is None:
            self._name = yield from read_string(source)
            return bool(self._name)
        if key in ARGUMENTS and self._arguments is None:
            return (yield from self._take_arguments())
        return bool((yield from read_value(source)))

    def _take_arguments(self) -> Reading[bool]:
        """Read the arguments: an object, or a string that contains one."""
        source = self._source
        self._arguments = NOTHING
        if self._name is not None and (yield from source.peek()) == "{":
            self._has_begun = True
            yield self._calls.begin(self._name)
            return (yield from read_arguments(source, self._calls))
        value = yield from read_value(source)
        if value.startswith('"'):
            value = (string_value(value) or "").strip() or NOTHING
        elif value == "null":
            value = NOTHING
        self._arguments = value
        return value.startswith("{")
