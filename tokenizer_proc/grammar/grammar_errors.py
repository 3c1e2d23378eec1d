"""Errors of grammars in this server's words: no library's text reaches a client.

What a library says is looked up here. Names, numbers and places in it are told where the client
wrote them; all else of it goes to the log. Pure.
"""

import json
import re
from typing import Any

import msgspec

from headrace.tokenizer_proc.requests.constraints import Constraint, Kind
from headrace.tokenizer_proc.requests.validation_errors import fault_of

MAX_SHOWN = 80  # characters of what the client wrote
MAX_LOGGED = 400  # characters of what the library says


class GrammarError(ValueError):
    """A grammar is refused by this server itself: the text is fit for clients."""


NO_TEXT = "no text matches it"
TOO_MUCH = "takes too much work to compile; use fewer or smaller repetitions and alternatives"
TOO_DEEP = "is nested too deeply; use fewer levels"
# By kind, the text of an error that is not listed here.
NOT_VALID: dict[Kind, str] = {
    "json_schema": "is no JSON Schema that can be followed; see docs/structured_output.md",
    "regex": "is no regular expression; the syntax is that of Rust's regex",
    "lark": "cannot be followed; ask for something simpler",
    "grammar": "is no grammar; the syntax is Lark, or GBNF with '::='",
    "structural_tag": "cannot be followed; check its regexes, grammars and schemas",
}

Words = tuple[tuple[str, str], ...]  # what a library says, as a regex, and what that is here

# Of the crate `regex-syntax`.
IN_A_REGEX: Words = (
    ("unclosed group", "a group is not closed; add ')', or write '\\('"),
    ("unopened group", "')' closes no group; write '\\)'"),
    ("unclosed character class", "a class is not closed; add ']', or write '\\['"),
    ("invalid character class range", "a range of characters ends before it begins"),
    ("invalid range boundary", "a range must be from one character to another"),
    ("invalid repetition count range", "a repetition has a maximum below its minimum"),
    ("valid decimal", "a repetition needs numbers; write '\\{' for the character"),
    ("unclosed counted repetition", "a repetition is not closed; add '}', or write '\\{'"),
    ("missing expression", "there is nothing to repeat; write '\\' before the character"),
    ("look-?arounds?", "anchors, boundaries and look-around are not supported; leave them out"),
    ("backreferences", "backreferences are not supported; write the text again"),
    ("escape sequence", "there is no such escape; leave out the '\\', or double it"),
    ("Unicode property", "there is no such class of characters"),
    ("hexadecimal", "the escape is no character; write '\\xhh' or '\\u{hhhh}'"),
    ("duplicate capture group", "two groups have one name; choose another"),
    ("capture group", "the group's name is not valid; use letters, digits and _"),
    ("flag", "there is no such flag; 'i', 's', 'm', 'x' and 'u' are known"),
    ("invalid UTF-8", "it matches what is not UTF-8; leave out '(?-u)'"),
)
# Of llguidance, of schemas; a group is what the client wrote.
IN_A_SCHEMA: Words = (
    (r"Invalid type: (.*)", "there is no type '{0}'; use JSON's"),
    (r"^type must be", "'type' must be a string, or an array of strings"),
    (r"Pointer '(.*)' does not exist", "there is nothing at the $ref '#{0}'; put it into $defs"),
    (r"Resource '(.*)' is not present", "'{0}' is not fetched; put the schema into $defs"),
    (r"Invalid URI reference '(.*)': ", "'{0}' is no URI reference"),
    (
        r"Unsatisfiable schema: (\w+) \((\S+)\) is greater than (\w+) \((\S+)\)",
        "no text matches it: {0}, {1}, is above {2}, {3}",
    ),
    (
        r"required property '(.*)' is unsatisfiable",
        "no text matches it: the required property '{0}' can have no value",
    ),
    (r"schema is false", "no text matches a schema that is false"),
    (r"Unsatisfiable", NO_TEXT),
    (r"Value for '(.*?)' has too many digits", "'{0}' has too many digits; round it"),
    (r"Unknown format: (.*)", "the format '{0}' is not supported in a schema; use 'pattern'"),
    (r"Expected array for '(.*?)'", "'{0}' must be an array"),
    (r"Expected positive integer for '(.*?)'", "'{0}' must be a whole number, 0 or above"),
    (r"Expect.*number for '(.*?)'", "'{0}' must be a number"),
    (r"(\S+) must be an array", "'{0}' must be an array"),
    (r"schema must be an object or boolean", "a schema must be an object, true or false"),
    (r"(\S+) must be an object", "'{0}' must be an object"),
    (r"(\S+) must be a string", "'{0}' must be a string"),
    (r"Expecting object schema", "a schema must be an object"),
    (r"invalid multiple of", "'multipleOf' must be above 0"),
    (r"are not disjoint", "two of patternProperties may match one name; make them exclude that"),
)
# Of llguidance, of Lark and GBNF.
IN_A_GRAMMAR: Words = (
    (r"^lexer error: |fuel|too many", TOO_MUCH),
    (r'unknown name: "(.*?)"', "there is no rule '{0}'; define it"),
    (r"Rule '(.*?)' not found", "there is no rule '{0}'; define it"),
    (r'unknown special token: "(.*?)"', "this model has no special token '{0}'; quote a text"),
    (r"Token range|unknown grammar", "only the client's own rules may be referred to"),
    (r"Unknown common regex: (common\.\w+)", "there is no '{0}' to import; define it"),
    (r'duplicate rule: "(.*?)"', "the rule '{0}' is there twice; use '|'"),
    (r'circular reference in token "(.*?)"', "the token '{0}' refers to itself; use lower case"),
    (r"no start rule|^Empty grammar", "there must be a rule called 'start'"),
    (r"No 'root' rule", "there must be a rule called 'root'"),
    (r"range end must be", "a repetition has a maximum below its minimum"),
    (r"Unexpected end of input", "it ends too early; close quotes and brackets"),
    (r"lexer error|Expected|Unexpected", "it is not Lark, or GBNF with '::='; mend what is there"),
)
KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
REGEX = re.compile(r"regex parse error:\n {4}(?P<shown>.*)\n {4}(?P<before> *)\^", re.MULTILINE)
REASON = re.compile(r"^error: (.*)$", re.MULTILINE)
LINE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
GBNF_LINE = re.compile(r" at line (\d+), ")


def reworded(error: Exception, constraint: Constraint) -> str:
    """Return a grammar's error and the remedy, for the client."""
    text, source = str(error).strip(), constraint.source
    if isinstance(error, GrammarError) or text == NO_TEXT:
        return text
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: see line {error.lineno}, column {error.colno}"
    if isinstance(error, RecursionError) or re.search(
        "too deeply|nested parentheses|recursion", text
    ):
        return TOO_DEEP
    keywords = KEYWORDS.search(text)
    if keywords:
        return f"not supported in a schema: {keywords[1].replace(chr(34), '')}"
    if "oneOf" in text and "coerce" in text:
        return "oneOf is supported only where no two of its schemas can hold at once; use anyOf"
    if text.startswith("NoExtension"):
        return NO_TEXT
    if re.search("regex parse error|invalid regex|lookarounds", text):
        return regex_error(text, constraint)
    tables: Words = ()
    if constraint.kind in ("json_schema", "structural_tag") or "JSON schema" in text:
        tables += IN_A_SCHEMA
    found = looked_up(tables + IN_A_GRAMMAR, text.partition("\n")[0], source)
    return f"{found or NOT_VALID[constraint.kind]}{place_of(text, constraint)}"


def regex_error(text: str, constraint: Constraint) -> str:
    """Return a regular expression's error and its position."""
    reason = REASON.search(text)
    why = looked_up(IN_A_REGEX, reason[1] if reason else text, "")
    of = "is no" if constraint.kind == "regex" else "has an invalid"
    found = f"{of} regular expression: {why or 'the syntax is that of Rust'}"
    caret = REGEX.search(text)
    if caret is None:
        return f"{found}{place_of(text, constraint)}"
    shown, at = caret["shown"], len(caret["before"])
    at, shown = len(shown[:at].replace(r"\/", "/")), shown.replace(r"\/", "/")
    if constraint.kind == "regex":
        return f"{found}, at character {at + 1}" if shown == constraint.source else found
    if is_of(shown, constraint.source) and len(shown) <= MAX_SHOWN:
        return f"{found}, at character {at + 1} of '{shown}'{place_of(text, constraint)}"
    return f"{found}{place_of(text, constraint)}"


def looked_up(words: Words, text: str, source: str) -> str:
    """Return what a library's text is here; empty is that it is not known.

    A group that the client did not write, or that is long, is left as an ellipsis.
    """
    for pattern, own in words:
        found = re.search(pattern, text)
        if found is not None:
            groups = [group.strip() for group in found.groups()]
            values = [g if is_of(g, source) and len(g) <= MAX_SHOWN else "…" for g in groups]
            return own.format(*values) if values else own
    return ""


def is_of(part: str, source: str) -> bool:
    """Whether the client wrote a part, as it is or within a string of JSON."""
    return part in source or json.dumps(part)[1:-1] in source


def place_of(text: str, constraint: Constraint) -> str:
    """Return where in the client's grammar an error is; empty is that it is not known."""
    if constraint.kind != "grammar":  # others are written by this server
        return ""
    gbnf = GBNF_LINE.search(text)
    if gbnf is not None:
        return f", at line {gbnf[1]}"
    lark = LINE.search(text)
    if lark is None or "::=" in constraint.source:  # that is made into Lark first
        return ""
    return f", at line {lark[1]}, column {lark[2]}"


def tag_error(error: msgspec.DecodeError, kind: Any) -> GrammarError:
    """Return the error of a structural tag that cannot be decoded as `kind`."""
    if not isinstance(error, msgspec.ValidationError):
        return GrammarError("no structural tag: it is not JSON")
    fault = fault_of(str(error), kind)
    if not fault.is_known:
        return GrammarError(f"no structural tag: {fault.where or 'it'} is not as xgrammar has it")
    return GrammarError(f"no structural tag: {fault.described('it')}")


def for_the_log(error: Exception) -> str:
    """Return a library's error in one line; "" if the text is this server's alone."""
    cause = error.__cause__ if isinstance(error, GrammarError) else error
    return "" if cause is None else " ".join(str(cause).split())[:MAX_LOGGED]
