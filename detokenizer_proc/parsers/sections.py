"""Sections of calls: DeepSeek's of V3, R1 and V3.1, and Kimi K2's.

A call is a name, a separator and JSON between two marks, and all calls of an answer are between two
others. DeepSeek V3 and R1 write `function`, the separator, and the name before a fenced block of
JSON. Kimi K2 writes an id, `functions.name:0`, for a name.
"""

import re
from typing import NamedTuple

from headrace.detokenizer_proc.parsers.content import read_content
from headrace.detokenizer_proc.parsers.json_call import Calls, read_arguments
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource
from headrace.model.output_formats import TOOL_MARKS, ToolFormat

FENCE = "```"
WORD = re.compile(r"[\w.\-:]*")
KIMI_ID = re.compile(r"(?:functions\.)?([\w.\-]+):\d+")


class SectionMarks(NamedTuple):
    """Around all calls, around each of them, and before its arguments."""

    calls_begin: str
    begin: str
    separator: str
    end: str
    calls_end: str


DEEPSEEK = SectionMarks(*TOOL_MARKS[ToolFormat.DEEPSEEK_V3])
KIMI_K2 = SectionMarks(*TOOL_MARKS[ToolFormat.KIMI_K2])


def read_sections(source: TextSource, calls: Calls, section: SectionMarks) -> Reading[None]:
    """Read an answer."""
    marks = [section.calls_begin, section.begin]
    while mark := (yield from read_content(source, *marks, after_call=calls.num > 0)):
        if mark == section.calls_begin:
            yield from source.run(SPACE)
            if not (yield from source.has(section.begin)):
                yield Content(source.settle())
                continue
            mark = section.begin
        if mark != section.begin:
            continue
        if (yield from read_call(source, calls, section)):
            marks = [*section[:2], *section[3:]]
        if left := source.settle():
            yield Content(left)


def read_call(source: TextSource, calls: Calls, section: SectionMarks) -> Reading[bool]:
    """Read a call up to the end of its arguments; return whether it is one."""
    yield from source.run(SPACE)
    name = yield from source.run(WORD)
    yield from source.run(SPACE)
    if not (yield from source.has(section.separator)):
        return False
    yield from source.run(SPACE)
    if (yield from source.peek()) != "{":
        name = yield from source.run(WORD)
        yield from source.run(SPACE)
        yield from source.has(FENCE + "json")
        yield from source.run(SPACE)
    if not name or (yield from source.peek()) != "{":
        return False
    id = KIMI_ID.fullmatch(name)
    yield calls.begin(name) if id is None else calls.begin(id[1], name)
    if (yield from read_arguments(source, calls)):
        yield from source.run(SPACE)
        if (yield from source.has(FENCE)):
            source.settle()
        else:
            source.rewind()
    return True
