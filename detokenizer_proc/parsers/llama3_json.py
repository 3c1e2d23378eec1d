"""Llama 3: `{"name": …, "parameters": {…}}` and nothing else, or after `<|python_tag|>`; several
with semicolons between."""

from headrace.detokenizer_proc.parsers.content import read_content
from headrace.detokenizer_proc.parsers.json_call import CallReader, Calls
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource

TAG = "<|python_tag|>"


def read_llama3_json(source: TextSource, calls: Calls) -> Reading[None]:
    """Read an answer."""
    yield from source.run(SPACE)
    if (yield from source.peek()) == "{":
        yield from read_calls(source, calls)
    else:
        source.rewind()
    while (yield from read_content(source, TAG, after_call=calls.num > 0)):
        yield from source.run(SPACE)
        yield from read_calls(source, calls)


def read_calls(source: TextSource, calls: Calls) -> Reading[None]:
    """Read calls one after the other, as long as they are some."""
    while True:
        is_call = yield from CallReader(source, calls, is_strict=True).read()
        if left := source.settle():
            yield Content(left)
        if not is_call or left:
            return
        yield from source.run(SPACE)
        if not (yield from source.has(";")):
            source.rewind()
            return
        yield from source.run(SPACE)
