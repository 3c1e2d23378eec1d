"""The patterns of JSON Schemas, which are ECMAScript's, in the dialect of Rust's `regex`.

The two write much alike and mean other things by some of it: `.` and `\\s`, what an escaped letter
is, a bracket within brackets. What is the same goes through, what has no counterpart is refused.
"""

import re

from headrace.tokenizer_proc.grammar.grammar_errors import GrammarError

# What ECMAScript takes for white space; Rust has U+0085 among it and lacks U+FEFF.
SPACE = (
    r"\u{9}-\u{d}\u{20}\u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}"
    r"\u{feff}"
)
LINE_END = r"\u{a}\u{d}\u{2028}\u{2029}"
SETS = {"d": "0-9", "w": "0-9A-Z_a-z", "s": SPACE}
CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "0": "\0"}

ESCAPE = re.compile(
    r"""\\(?:
        (?P<set>[dws]) | (?P<others>[DWS]) | (?P<property>[pP]\{[\w=]+\})
        | (?P<control>[tnvfr]|0(?!\d)) | c(?P<letter>[A-Za-z])
        | u(?P<high>[dD][89abAB][\da-fA-F]{2})\\u(?P<low>[dD][c-fC-F][\da-fA-F]{2})
        | x(?P<byte>[\da-fA-F]{2}) | u(?P<unit>[\da-fA-F]{4}) | u\{(?P<point>[\da-fA-F]{1,6})\}
        | (?P<itself>[\W_])
    )""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
REPEAT = re.compile(r"\{\d+(,\d*)?\}", re.ASCII)
GROUP = re.compile(r"\((\?(:|i:|i\)|P?<[A-Za-z_]\w*>))?", re.ASCII)


def rust_pattern(pattern: str) -> str:
    """Return a pattern that matches the same in Rust.

    Raises:
        ValueError: it has a part that is not ECMAScript's, or that Rust has no counterpart of.
    """
    found, at = [], 0
    while at < len(pattern):
        part, at = element(pattern, at)
        found.append(part)
    return "".join(found)


def element(pattern: str, at: int) -> tuple[str, int]:
    """Return what stands at a place, outside of brackets, and where it ends."""
    match pattern[at]:
        case "\\":
            char, part, end = escape(pattern, at)
            return (f"[{part}]" if char is None else part), end
        case ".":
            return f"[^{LINE_END}]", at + 1
        case "[":
            return brackets(pattern, at)
        case "(":
            group = GROUP.match(pattern, at)
            assert group is not None
            if pattern.startswith("?", group.end()):
                raise refusal(pattern[at : at + 3])
            return "(?:" if "<" in group[0] else group[0], group.end()
        case "{" if (repeat := REPEAT.match(pattern, at)) is not None:
            return repeat[0], repeat.end()
        case "^" | "$" | "|" | ")" | "*" | "+" | "?":
            return pattern[at], at + 1
        case char:
            return literal(char), at + 1


def brackets(pattern: str, at: int) -> tuple[str, int]:
    """Return a class of characters, and where it ends."""
    end = at + 1
    negated = pattern.startswith("^", end)
    end += negated
    parts = []
    while not pattern.startswith("]", end):
        char, part, end = member(pattern, end)
        if pattern.startswith("-", end) and not pattern.startswith("-]", end):
            last, last_part, end = member(pattern, end + 1)
            if char is None or last is None or char > last:
                raise refusal(f"{part}-{last_part}")
            part = f"{part}-{last_part}"
        parts.append(part)
    if not parts:
        raise refusal(pattern[at : end + 1])
    return f"[{'^' if negated else ''}{''.join(parts)}]", end + 1


def member(pattern: str, at: int) -> tuple[str | None, str, int]:
    """Return a character, or None for several, as Rust writes it in a class, and where it ends."""
    if at >= len(pattern):
        raise refusal(pattern)
    if pattern.startswith("\\b", at):
        return "\b", literal("\b"), at + 2
    if pattern[at] == "\\":
        return escape(pattern, at)
    return pattern[at], literal(pattern[at]), at + 1


def escape(pattern: str, at: int) -> tuple[str | None, str, int]:
    """Return the same of an escape."""
    found = ESCAPE.match(pattern, at)
    if found is None:
        raise refusal(pattern[at : at + 2])
    end = found.end()
    if found["set"]:
        return None, SETS[found["set"]], end
    if found["others"]:
        return None, f"[^{SETS[found['others'].lower()]}]", end
    if found["property"]:
        return None, f"\\{found['property']}", end
    char = found["itself"] or CONTROLS.get(found["control"] or "")
    if found["letter"]:
        char = chr(ord(found["letter"]) % 32)
    elif found["high"]:
        surrogates = bytes.fromhex(found["high"] + found["low"])
        char = surrogates.decode("utf-16-be")
    elif char is None:
        code = int(found["byte"] or found["unit"] or found["point"], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise refusal(found[0])
        char = chr(code)
    return char, literal(char), end


def literal(char: str) -> str:
    """Return a character as Rust writes it, within brackets or not."""
    return char if char.isalnum() else f"\\u{{{ord(char):x}}}"


def refusal(part: str) -> GrammarError:
    """Return the error of a part that cannot be followed."""
    return GrammarError(f"not supported in a pattern: {part}")
