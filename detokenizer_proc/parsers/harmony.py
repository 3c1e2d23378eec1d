"""Harmony, gpt-oss: messages of `<|start|>assistant`, a header, `<|message|>`, the text, `<|end|>`.

A header names a channel: `analysis` is thoughts, `commentary` and `final` are words to the reader.
It may name a recipient, `to=functions.f`: the text then is the arguments of a call, which ends with
`<|call|>`. The prompt ends with the first message's `<|start|>assistant`.
"""

import re

from headrace.detokenizer_proc.parsers.json_call import NOTHING, Calls
from headrace.detokenizer_proc.parsers.pieces import Content, Thought
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource

START, MESSAGE = "<|start|>", "<|message|>"
OPENINGS = (START, "<|channel|>", "to=")
ENDS = ("<|end|>", "<|call|>", START)  # the last one is that of the next message
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")


def read_harmony(source: TextSource, calls: Calls | None, tells_thoughts: bool) -> Reading[None]:
    """Read an answer; without `calls` or `tells_thoughts` theirs are words to the reader."""
    while (yield from source.peek()):
        header = yield from read_header(source)
        called = RECIPIENT.search(header)
        if called is not None and calls is not None:
            yield calls.begin(called[1])
            mark = yield from read_call(source, calls)
        elif tells_thoughts and ANALYSIS.search(header):
            mark = yield from source.until(ENDS, Thought)
        else:
            mark = yield from source.until(ENDS, Content)
        if mark == START:
            source.rewind()
        source.settle()


def read_header(source: TextSource) -> Reading[str]:
    """Read what comes before a message's text; "" where there is no header."""
    yield from source.run(SPACE)
    for opening in OPENINGS:
        if (yield from source.has(opening)):
            break
    else:
        source.rewind()
        return ""
    text, mark = opening, ""
    while text and not mark:
        text, mark = yield from source.before((MESSAGE,))
    header = source.settle()
    if mark:
        return header
    yield Content(header)  # the text has ended within it
    return ""


def read_call(source: TextSource, calls: Calls) -> Reading[str]:
    """Pass on the arguments of a call; return the mark behind them."""
    text, has_some = "", False
    while True:
        source.settle()
        text, mark = yield from source.before(ENDS)
        if not text:
            break
        has_some = True
        yield calls.more(text)
    if not has_some:
        yield calls.more(NOTHING)
    return mark
