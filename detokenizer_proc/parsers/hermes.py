"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as often as needed."""

from headrace.detokenizer_proc.parsers.content import read_content
from headrace.detokenizer_proc.parsers.json_call import CallReader, Calls
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource

BEGIN, END = "<tool_call>", "</tool_call>"


def read_hermes(source: TextSource, calls: Calls) -> Reading[None]:
    """Read an answer."""
    marks = [BEGIN]
    while mark := (yield from read_content(source, *marks, after_call=calls.num > 0)):
        marks = [BEGIN]
        if mark == END:
            continue
        yield from source.run(SPACE)
        if (yield from CallReader(source, calls).read()):
            marks.append(END)
        if left := source.settle():
            yield Content(left)
