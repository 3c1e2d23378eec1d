"""GLM 4.5 to 4.7: `<tool_call>name`, then `<arg_key>key</arg_key>` and `<arg_value>`, the value and
`</arg_value>` for each argument, `</tool_call>`, maybe on lines of their own.

A value is a string where the tool says so, else JSON, and a string after all if it is none.
"""

import re

from headrace.detokenizer_proc.parsers.content import read_content
from headrace.detokenizer_proc.parsers.json_call import Calls
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource
from headrace.detokenizer_proc.parsers.tagged import StringParameters, quoted, read_parameter

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
NAME, KEY_NAME = re.compile(r"[\w.\-]*"), re.compile(r"[^<]*")


def read_glm(source: TextSource, calls: Calls, strings: StringParameters) -> Reading[None]:
    """Read an answer."""
    while (yield from read_content(source, BEGIN, after_call=calls.num > 0)):
        yield from read_call(source, calls, strings)
        if left := source.settle():
            yield Content(left)


def read_call(source: TextSource, calls: Calls, strings: StringParameters) -> Reading[None]:
    """Read a call from its name on; what is none is left to be settled."""
    yield from source.run(SPACE)
    name = yield from source.run(NAME)
    yield from source.run(SPACE)
    has_key = yield from source.has(KEY)
    if not name or not (has_key or (yield from source.has(END))):
        return
    source.settle()
    yield calls.begin(name)
    if not has_key:
        yield calls.more("{}")
        return
    separator = "{"
    while has_key:
        key = yield from source.run(KEY_NAME)
        if not (yield from source.has(KEY_END)):
            return
        yield from source.run(SPACE)
        if not (yield from source.has(VALUE)):
            return
        source.settle()
        yield calls.more(f"{separator}{quoted(key)}: ")
        separator = ", "
        if not (
            yield from read_parameter(source, calls, key in strings.get(name, ()), (VALUE_END,))
        ):
            return  # the text has ended
        yield from source.run(SPACE)
        has_key = yield from source.has(KEY)
    if (yield from source.has(END)):
        source.settle()
        yield calls.more("}")
