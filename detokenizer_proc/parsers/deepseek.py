"""DeepSeek: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a fenced block of JSON on lines of
its own and `<｜tool▁call▁end｜>` (V3, R1), or `name<｜tool▁sep｜>{…}` between them (V3.1).

All calls are between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.
"""

import re

from headrace.detokenizer_proc.parsers.content import read_content
from headrace.detokenizer_proc.parsers.json_call import Calls, read_arguments
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"
WORD = re.compile(r"[\w.\-]*")


def read_deepseek(source: TextSource, calls: Calls) -> Reading[None]:
    """Read an answer."""
    marks = [CALLS_BEGIN, BEGIN]
    while mark := (yield from read_content(source, *marks, after_call=calls.num > 0)):
        if mark == CALLS_BEGIN:
            yield from source.run(SPACE)
            if not (yield from source.has(BEGIN)):
                yield Content(source.settle())
                continue
            mark = BEGIN
        if mark != BEGIN:
            continue
        if (yield from read_call(source, calls)):
            marks = [CALLS_BEGIN, BEGIN, END, CALLS_END]
        if left := source.settle():
            yield Content(left)


def read_call(source: TextSource, calls: Calls) -> Reading[bool]:
    """Read a call up to the end of its arguments; return whether it is one."""
    yield from source.run(SPACE)
    name = yield from source.run(WORD)
    yield from source.run(SPACE)
    if not (yield from source.has(SEPARATOR)):
        return False
    yield from source.run(SPACE)
    if (yield from source.peek()) != "{":
        name = yield from source.run(WORD)
        yield from source.run(SPACE)
        yield from source.has(FENCE + "json")
        yield from source.run(SPACE)
    if not name or (yield from source.peek()) != "{":
        return False
    yield calls.begin(name)
    if (yield from read_arguments(source, calls)):
        yield from source.run(SPACE)
        if (yield from source.has(FENCE)):
            source.settle()
        else:
            source.rewind()
    return True
