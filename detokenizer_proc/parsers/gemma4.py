"""Gemma 4: `<|tool_call>call:name{key:value,…}<tool_call|>`, as often as needed.

Strings are between two `<|"|>`, and keys stand as they are; otherwise values are as in JSON. Keys
and strings of JSON are read, too: a grammar may demand them.
"""

import re

from headrace.detokenizer_proc.parsers.content import read_content
from headrace.detokenizer_proc.parsers.json_call import Calls, read_string
from headrace.detokenizer_proc.parsers.json_call import read_value as read_json
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource
from headrace.detokenizer_proc.parsers.tagged import as_json, quoted
from headrace.detokenizer_proc.parsers.value_end import CLOSERS
from headrace.model.output_formats import TOOL_MARKS, ToolFormat

BEGIN, END, QUOTE = TOOL_MARKS[ToolFormat.GEMMA4]
CALL = "call:"
NAME = re.compile(r"[\w.\-]*")
KEY, SCALAR = re.compile(r"[^:,{}\[\]<]*"), re.compile(r"[^,{}\[\]<]*")


def read_gemma4(source: TextSource, calls: Calls) -> Reading[None]:
    """Read an answer."""
    while (yield from read_content(source, BEGIN, after_call=calls.num > 0)):
        yield from source.run(SPACE)
        if (yield from source.has(CALL)):
            name = yield from source.run(NAME)
            if name and (yield from source.has("{")):
                yield calls.begin(name)
                yield from read_object(source, calls)
                yield from source.run(SPACE)
                if (yield from source.has(END)):
                    source.settle()
        if left := source.settle():
            yield Content(left)


def read_object(source: TextSource, calls: Calls) -> Reading[None]:
    """Pass on an object after its brace, as JSON; from what is not well-formed on, all is left."""
    closers, has_key = ["}"], False
    source.settle()
    yield calls.more("{")
    while closers:
        yield from source.run(SPACE)
        if not has_key and (yield from source.has(closers[-1])):
            source.settle()
            yield calls.more(closers.pop())
        elif not has_key and (yield from source.has(",")):
            source.settle()
            yield calls.more(", ")
        elif not has_key and closers[-1] == "}":
            if not (yield from read_key(source, calls)):
                return
            has_key = True
        elif (opener := (yield from source.peek())) in ("{", "["):
            yield from source.has(opener)
            source.settle()
            yield calls.more(opener)
            closers.append(CLOSERS[opener])
            has_key = False
        else:
            if not (yield from read_value(source, calls)):
                return
            has_key = False


def read_key(source: TextSource, calls: Calls) -> Reading[bool]:
    """Pass on a key; return whether there is one."""
    if (yield from source.has(QUOTE)):
        key, mark = "", ""
        while not mark:
            text, mark = yield from source.before((QUOTE,))
            if not text and not mark:
                return False
            key += text
    elif (yield from source.peek()) == '"':
        found = yield from read_string(source)
        if found is None:
            return False
        key = found
        yield from source.run(SPACE)
    else:
        key = (yield from source.run(KEY)).strip()
    if not (yield from source.has(":")):
        return False
    source.settle()
    yield calls.more(f"{quoted(key)}: ")
    return True


def read_value(source: TextSource, calls: Calls) -> Reading[bool]:
    """Pass on a string, or what is not a list or an object; return whether it is whole."""
    if not (yield from source.has(QUOTE)):
        is_json = (yield from source.peek()) == '"'
        value = yield from (read_json(source) if is_json else source.run(SCALAR))
        value = value.strip()
        if not value:
            return False
        source.settle()
        yield calls.more(as_json(value))
        return True
    yield calls.more('"')
    mark = yield from source.until((QUOTE,), lambda text: calls.more(quoted(text)[1:-1]))
    source.settle()
    if mark:
        yield calls.more('"')
    return bool(mark)
