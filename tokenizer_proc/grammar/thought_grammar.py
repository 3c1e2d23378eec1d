"""The grammar of an answer with what may be before it or in its place: thoughts, calls of tools.

Each is a grammar of its own, in llguidance's dialect of Lark, which refers to the answer's.
"""

from collections.abc import Mapping

import msgspec

from headrace.ipc.messages import Parsing
from headrace.model.output_formats import THOUGHT_MARKS
from headrace.tokenizer_proc.requests.constraints import quoted


class Grammar(msgspec.Struct):
    """A grammar as llguidance lists it: Lark, or a schema, whose numbers stay as they are."""

    name: str
    lark_grammar: str | None = None
    json_schema: msgspec.Raw = msgspec.Raw(b"null")


class Several(msgspec.Struct):
    """llguidance's list of grammars: it begins with the first, which may refer to others."""

    grammars: list[Grammar]


def thoughts_of(parsing: Parsing, special_tokens: Mapping[str, int]) -> str:
    """Return the rules of the thoughts before an answer; empty is none.

    Thoughts that the prompt has begun must come to an end; others may be left out. Marks are
    written as tokens where they are special, and as text otherwise.
    """
    if parsing.thoughts is None:
        return ""
    begin, end = THOUGHT_MARKS[parsing.thoughts]
    first = f"<[{special_tokens[begin]}]>" if begin in special_tokens else quoted(begin)
    inside = f"({first})? inside" if parsing.begins_inside else f"({first} inside)?"
    rules = [f"thoughts: {inside}", r"SPACE: /\n{0,2}/"]
    if end in special_tokens:  # and is not written as text, which would end the thoughts, too
        rules.append(f"inside: THOUGHT <[{special_tokens[end]}]> SPACE")
        rules.append(f"THOUGHT: /(?s:.*)/ & ~(/(?s:.*)/ {quoted(end)} /(?s:.*)/)")
    else:
        rules.append("inside: thought SPACE")
        rules.append(f"thought[suffix={quoted(end)}]: /(?s:.*)/")
    return "\n".join(rules)


def after_thoughts(thoughts: str, answer: str, is_lark: bool) -> str:
    """Return the grammar of thoughts and then an answer.

    Args:
        thoughts: the rules that `thoughts_of` returns, not none.
        answer: a grammar in Lark, or a list in llguidance's JSON, of which the first begins.
    """
    whole = Grammar("whole", f"start: thoughts @answer\n{thoughts}")
    if is_lark:
        return in_json(whole, Grammar("answer", answer))
    first, *others = msgspec.json.decode(answer, type=Several).grammars
    return in_json(whole, msgspec.structs.replace(first, name="answer"), *others)


def or_calls(calls: str, answer: str, is_lark: bool) -> str:
    """Return the grammar of calls of tools or an answer, as llguidance's list.

    Args:
        calls: a grammar in Lark.
        answer: a grammar in Lark, or a list in llguidance's JSON, of which the first begins.
    """
    both = [Grammar("either", "start: @calls | @text"), Grammar("calls", calls)]
    if is_lark:
        return in_json(*both, Grammar("text", answer))
    first, *others = msgspec.json.decode(answer, type=Several).grammars
    return in_json(*both, msgspec.structs.replace(first, name="text"), *others)


def in_json(*grammars: Grammar) -> str:
    """Return grammars in llguidance's JSON."""
    return msgspec.json.encode(Several(list(grammars))).decode()
