"""Qwen3-Coder: `<tool_call>`, `<function=name>`, then `<parameter=key>`, the value and
`</parameter>` for each argument, `</function>`, `</tool_call>`, on lines of their own.

A value is a string where the tool says so, else JSON, and a string after all if it is none.
"""

import json
import re
from collections.abc import Collection, Mapping

from headrace.detokenizer_proc.parsers.content import read_content
from headrace.detokenizer_proc.parsers.json_call import Calls
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
ENDS = ("\n" + PARAMETER_END, PARAMETER_END)
NAME = re.compile(r"[^>\s]*")
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}

StringParameters = Mapping[str, Collection[str]]  # by tool


def read_qwen3_coder(source: TextSource, calls: Calls, strings: StringParameters) -> Reading[None]:
    """Read an answer."""
    marks = [BEGIN, FUNCTION]
    while mark := (yield from read_content(source, *marks, after_call=calls.num > 0)):
        marks = [BEGIN, FUNCTION]
        if mark == END:
            continue
        if mark == BEGIN:
            yield from source.run(SPACE)
            if not (yield from source.has(FUNCTION)):
                yield Content(source.settle())
                continue
        if (yield from read_function(source, calls, strings)):
            marks.append(END)
        if left := source.settle():
            yield Content(left)


def read_function(source: TextSource, calls: Calls, strings: StringParameters) -> Reading[bool]:
    """Read a call from its name on; return whether it is one."""
    name = yield from source.run(NAME)
    if not name or not (yield from source.has(">")):
        return False
    source.settle()
    yield calls.begin(name)
    separator = "{"
    yield from source.run(SPACE)
    while (yield from source.has(PARAMETER)):
        key = yield from source.run(NAME)
        if not key or not (yield from source.has(">")):
            break
        yield from source.has("\n")
        source.settle()
        yield calls.more(f"{separator}{quoted(key)}: ")
        separator = ", "
        if not (yield from read_parameter(source, calls, key in strings.get(name, ()), ENDS)):
            return True  # the text has ended
        yield from source.run(SPACE)
    has_end = yield from source.has(FUNCTION_END)
    if has_end or (yield from source.has(END)):
        source.settle()
        yield calls.more("{}" if separator == "{" else "}")
    return True


def read_parameter(
    source: TextSource, calls: Calls, is_string: bool, marks: tuple[str, ...]
) -> Reading[bool]:
    """Read a value up to one of `marks`; return whether that came."""
    if is_string:
        yield calls.more('"')
        mark = yield from source.until(marks, lambda text: calls.more(quoted(text)[1:-1]))
        if mark:
            yield calls.more('"')
    else:
        text, mark, parts = " ", "", []
        while text:
            text, mark = yield from source.before(marks)
            parts.append(text)
        yield calls.more(as_json("".join(parts)))
    source.settle()
    return bool(mark)


def quoted(text: str) -> str:
    """Return a text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def refused(constant: str) -> None:
    """Refuse NaN and infinity, which are no JSON."""
    raise ValueError(constant)


def as_json(text: str) -> str:
    """Return a value as JSON: as it stands, or as the string it is."""
    try:
        json.loads(text, parse_constant=refused)
    except (ValueError, RecursionError):
        return PYTHON_NAMES.get(text.strip()) or quoted(text)
    return text
