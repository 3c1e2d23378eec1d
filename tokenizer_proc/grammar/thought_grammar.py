"""The grammar of an answer with what may be before it or in its place: thoughts, calls of tools.

Each is a grammar of its own, in llguidance's dialect of Lark, which refers to the answer's.
"""

from collections.abc import Mapping

import msgspec

from headrace.ipc.messages import Parsing
from headrace.model.output_formats import THOUGHT_MARKS, THOUGHT_TOKENS, ThoughtFormat
from headrace.tokenizer_proc.requests.constraints import quoted, spelled

# Harmony's messages: a thought and what is between it and the next header, and an answer's header.
HARMONY_THOUGHT, HARMONY_END = "<|channel|>analysis<|message|>", "<|end|>"
HARMONY_START, HARMONY_FINAL = "<|start|>assistant", "<|channel|>final<|message|>"


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
    tokens = THOUGHT_TOKENS[parsing.thoughts]
    special = {mark: special_tokens[mark] for mark in tokens if mark in special_tokens}
    if parsing.thoughts is ThoughtFormat.HARMONY:
        begin, end, space = HARMONY_THOUGHT, HARMONY_END, spelled(HARMONY_START, special)
    else:
        begin, end = THOUGHT_MARKS[parsing.thoughts]
        space = r"/\n{0,2}/"
    first = spelled(begin, special)
    inside = f"({first})? inside" if parsing.begins_inside else f"({first} inside)?"
    rules = [f"thoughts: {inside}", f"space: {space}"]
    if end in special:  # and is not written as text, which would end the thoughts, too
        rules.append(f"inside: THOUGHT {spelled(end, special)} space")
        rules.append(f"THOUGHT: /(?s:.*)/ & ~(/(?s:.*)/ {quoted(end)} /(?s:.*)/)")
    else:
        rules.append("inside: thought space")
        rules.append(f"thought[suffix={quoted(end)}]: /(?s:.*)/")
    return "\n".join(rules)


def opening_of(parsing: Parsing, special_tokens: Mapping[str, int]) -> str:
    """Return the rules of what comes directly before an answer's text; empty is nothing."""
    if parsing.thoughts is not ThoughtFormat.HARMONY:
        return ""
    return f"thoughts: {spelled(HARMONY_FINAL, special_tokens)}"


def after_thoughts(thoughts: str, answer: str, is_lark: bool, name: str = "answer") -> str:
    """Return the grammar of thoughts and then an answer, which is called `name` in it.

    Args:
        thoughts: the rules that `thoughts_of` or `opening_of` returns, not none.
        answer: a grammar in Lark, or a list in llguidance's JSON, of which the first begins.
    """
    whole = Grammar("whole", f"start: thoughts @{name}\n{thoughts}")
    if is_lark:
        return in_json(whole, Grammar(name, answer))
    first, *others = msgspec.json.decode(answer, type=Several).grammars
    return in_json(whole, msgspec.structs.replace(first, name=name), *others)


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
