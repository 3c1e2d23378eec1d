"""Thoughts before an answer: `<think>…</think>`, whose begin may be the prompt's last word."""

from collections.abc import Callable

from headrace.detokenizer_proc.parsers.pieces import Thought
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource


def read_thinking(
    source: TextSource,
    begin: str,
    end: str,
    is_inside: bool,
    then: Callable[[TextSource], Reading[None]],
    calls_begin: tuple[str, ...] = (),
) -> Reading[None]:
    """Read thoughts, if there are some, and `then` the answer.

    With `is_inside` the text begins with a thought, marked or not. Space around the marks is
    theirs, but for that before the end. `calls_begin` ends a thought, too, and is the answer's.
    """
    yield from source.run(SPACE)
    has_mark = yield from source.has(begin)
    if has_mark or is_inside:
        yield from source.run(SPACE)
        mark = yield from source.until((end, *calls_begin), Thought)
        if mark in calls_begin:
            source.rewind()
        elif mark:
            yield from source.run(SPACE)
        source.settle()
    else:
        source.rewind()
    yield from then(source)
