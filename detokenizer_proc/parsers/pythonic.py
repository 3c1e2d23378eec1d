"""Llama 4 and others: `[f(a=1), g(b="x")]` and nothing else, maybe between `<|python_start|>` and
`<|python_end|>`, or LFM2's `<|tool_call_start|>` and `<|tool_call_end|>`.

A call is known when the list is whole: Python is read by Python's own rules."""

import ast
import json
import re
import warnings
from typing import Any

from headrace.detokenizer_proc.parsers.content import read_content
from headrace.detokenizer_proc.parsers.json_call import Calls
from headrace.detokenizer_proc.parsers.pieces import Content
from headrace.detokenizer_proc.parsers.source import SPACE, Reading, TextSource
from headrace.detokenizer_proc.parsers.value_end import PYTHON, Shape

PYTHON_MARKS = ("<|python_start|>", "<|python_end|>")
LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
WORD = re.compile(r"[\w.]*")
JSON_NAMES = {"true": True, "false": False, "null": None}


class NoCall(Exception):
    """The text is no list of calls with values."""


def read_pythonic(
    source: TextSource, calls: Calls, marks: tuple[str, str] = PYTHON_MARKS
) -> Reading[None]:
    """Read an answer, whose calls are between `marks` or stand alone."""
    begin, end = marks
    yield from source.run(SPACE)
    yield from source.has(begin)
    yield from source.run(SPACE)
    found = parsed_calls((yield from read_list(source)))
    taken = source.settle()
    if found is None:
        if taken:
            yield Content(taken)
    else:
        for name, arguments in found:
            yield calls.begin(name)
            yield calls.more(arguments)
        yield from source.run(SPACE)
        if (yield from source.has(end)):
            source.settle()
        else:
            source.rewind()
    yield from read_content(source, after_call=calls.num > 0)


def read_list(source: TextSource) -> Reading[str]:
    """Read a list that begins with a call and return it; "" if there is none."""
    shape = Shape(PYTHON)
    if not (yield from source.has("[")):
        return ""
    shape.scan("[", 0)
    parts = [(yield from source.run(SPACE)), (yield from source.run(WORD))]
    if not parts[-1] or (yield from source.peek()) != "(":
        return ""
    while not shape.is_over:
        part = yield from source.scan(shape.scan)
        if not part:
            break
        parts.append(part)
    return "[" + "".join(parts) if shape.is_whole else ""


def parsed_calls(text: str) -> list[tuple[str, str]] | None:
    """Return names and arguments, as JSON, of a list of calls; None where it is not one."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that are none
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [parsed_call(call) for call in tree.elts]
    except (NoCall, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def parsed_call(node: ast.expr) -> tuple[str, str]:
    """Return the name and the arguments of a call."""
    if not isinstance(node, ast.Call) or node.args:
        raise NoCall
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise NoCall
        arguments[keyword.arg] = value_of(keyword.value)
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # half a surrogate pair is no text
    return name_of(node.func), text


def name_of(node: ast.expr) -> str:
    """Return a name, dots in it included."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{name_of(value)}.{name}"
        case _:
            raise NoCall


def value_of(node: ast.expr) -> Any:
    """Return a literal, as JSON has it."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=("true" | "false" | "null") as name):
            return JSON_NAMES[name]
        case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
            return [value_of(entry) for entry in nodes]
        case ast.Dict(keys=keys, values=values):
            return {key_of(key): value_of(value) for key, value in zip(keys, values, strict=True)}
        case _:
            raise NoCall


def key_of(node: ast.expr | None) -> str:
    """Return the key of a dict."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NoCall
