"""Calls between tags: those of Qwen3-Coder, Seed-OSS, MiniMax M2 and DeepSeek V3.2.

A call is a tag with the name; a tag with the key, the value and an end tag for each argument; an
end tag. Around a call, or several, there are two more. They may be on lines of their own.

A value is a string where the tag or else the tool says so, else JSON, and a string after all if it
is none.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from headrace.detokenizer_proc.parsers.content import read_content
from headrace.detokenizer_proc.parsers.json_call import Calls
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource

NAME = re.compile(r'[^">\s]*')
KEY = re.compile(r'[^">\n]*')
IS_STRING = ('" string="true">', '" string="false">')
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}

StringParameters = Mapping[str, Collection[str]]  # by tool


class Tags(NamedTuple):
    """The tags of a format; names come after those of a function and of a parameter."""

    begin: str
    end: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    name_end: str
    has_lines: bool = False  # values are on lines of their own


QWEN3_CODER = Tags(
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    ">",
    has_lines=True,
)
SEED_OSS = Tags(
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    ">",
)
MINIMAX_M2 = Tags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    '<invoke name="',
    "</invoke>",
    '<parameter name="',
    "</parameter>",
    '">',
)
DEEPSEEK_V32 = Tags(
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="',
    "</｜DSML｜parameter>",
    '">',
)


def read_tagged(
    source: TextSource, calls: Calls, strings: StringParameters, tags: Tags
) -> Reading[None]:
    """Read an answer."""
    marks = [tags.begin, tags.function]
    while mark := (yield from read_content(source, *marks, after_call=calls.num > 0)):
        marks = [tags.begin, tags.function]
        if mark == tags.end:
            continue
        if mark == tags.begin:
            yield from source.run(SPACE)
            if not (yield from source.has(tags.function)):
                yield Content(source.settle())
                continue
        if (yield from read_function(source, calls, strings, tags)):
            marks.append(tags.end)
        if left := source.settle():
            yield Content(left)


def read_function(
    source: TextSource, calls: Calls, strings: StringParameters, tags: Tags
) -> Reading[bool]:
    """Read a call from its name on; return whether it is one."""
    name = yield from source.run(NAME)
    if not name or not (yield from source.has(tags.name_end)):
        return False
    source.settle()
    yield calls.begin(name)
    separator = "{"
    ends = ("\n" + tags.parameter_end,) * tags.has_lines + (tags.parameter_end,)
    yield from source.run(SPACE)
    while (yield from source.has(tags.parameter)):
        key = yield from source.run(KEY)
        is_string = yield from read_kind(source, key in strings.get(name, ()), tags)
        if not key or is_string is None:
            break
        if tags.has_lines:
            yield from source.has("\n")
        source.settle()
        yield calls.more(f"{separator}{quoted(key)}: ")
        separator = ", "
        if not (yield from read_parameter(source, calls, is_string, ends)):
            return True  # the text has ended
        yield from source.run(SPACE)
    has_end = yield from source.has(tags.function_end)
    if has_end or (yield from source.has(tags.end)):
        source.settle()
        yield calls.more("{}" if separator == "{" else "}")
    return True


def read_kind(source: TextSource, by_schema: bool, tags: Tags) -> Reading[bool | None]:
    """Read the end of a parameter's tag; return whether its value is a string, None without it."""
    if (yield from source.has(tags.name_end)):
        return by_schema
    for mark, is_string in zip(IS_STRING, (True, False), strict=True):
        if (yield from source.has(mark)):
            return is_string
    return None


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
