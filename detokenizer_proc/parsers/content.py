"""Text beside calls."""

from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource


def read_content(source: TextSource, *marks: str, after_call: bool) -> Reading[str]:
    """Pass text on as content, up to one of `marks`; return that, or nothing at the end.

    Blank text next to a call is dropped.
    """
    source.settle()
    blank = yield from source.run(SPACE)
    for mark in marks:
        if (yield from source.has(mark)):
            return mark
    if blank and not (after_call and not (yield from source.peek())):
        yield Content(source.settle())
    return (yield from source.until(marks, Content))
