"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since 2025
`[TOOL_CALLS]name{…}`, where `[CALL_ID]…` and `[ARGS]` may stand before the arguments."""

import re
import secrets
import string

from headrace.detokenizer_proc.parsers.content import read_content
from headrace.detokenizer_proc.parsers.json_call import CallReader, Calls, read_arguments
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
WORD = re.compile(r"[\w.\-]*")


def new_mistral_id() -> str:
    """Return the id of a call as Mistral's templates want it back: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def read_mistral(source: TextSource, calls: Calls) -> Reading[None]:
    """Read an answer."""
    while (yield from read_content(source, BEGIN, after_call=calls.num > 0)):
        yield from source.run(SPACE)
        if (yield from source.has("[")):
            yield from read_list(source, calls)
        else:
            yield from read_named(source, calls)
        if left := source.settle():
            yield Content(left)


def read_list(source: TextSource, calls: Calls) -> Reading[None]:
    """Read calls up to the end of their list; text that is not a call is unsettled."""
    while True:
        yield from source.run(SPACE)
        is_call = yield from CallReader(source, calls).read()
        if not is_call:
            return
        yield from source.run(SPACE)
        if (yield from source.has("]")):
            source.settle()
            return
        if not (yield from source.has(",")):
            return
        source.settle()


def read_named(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a name and its arguments; other text is unsettled."""
    name = yield from source.run(WORD)
    if (yield from source.has(CALL_ID)):
        yield from source.run(WORD)
    yield from source.has(ARGS)
    yield from source.run(SPACE)
    if name and (yield from source.peek()) == "{":
        yield calls.begin(name)
        yield from read_arguments(source, calls)
