"""The grammar of a structural tag, in llguidance's dialect of Lark.

Its lexer does not look back, so free text and what ends it are one lexeme, which is complete as
soon as it can be. Hence each part is made together with the texts one of which follows it.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import permutations

import msgspec

from headrace.tokenizer_proc.grammar.exact_schemas import exact
from headrace.tokenizer_proc.grammar.grammar_errors import GrammarError
from headrace.tokenizer_proc.grammar.structural_tags import (
    AnyFormat,
    AnyOfFormat,
    AnyText,
    ConstString,
    Ebnf,
    JsonSchema,
    Maybe,
    Plus,
    Regex,
    Repeat,
    Schema,
    SeparatedTags,
    SequenceFormat,
    Star,
    Tag,
    TriggeredTags,
    decode_tag,
)
from headrace.tokenizer_proc.grammar.thought_grammar import Grammar, Several, in_json
from headrace.tokenizer_proc.requests.constraints import SOME_SPACE, quoted, special_in, spelled

Texts = tuple[str, ...]

EMPTY = '""'
ANYTHING = "/(?s:.*)/"
SPACING = {"whitespace_flexible": True, "whitespace_pattern": SOME_SPACE}


def tag_grammar(source: str, special_tokens: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag, as llguidance's list.

    Args:
        source: the tag, in JSON.
        special_tokens: their ids; where they stand in texts, it is they that are drawn.
    Raises:
        ValueError: it is no structural tag, or one that cannot be followed.
    """
    return TagGrammar(special_tokens).of(decode_tag(source))


class TagGrammar:
    """Makes the grammar of one structural tag."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        self._rules: list[str] = []
        self._others: list[Grammar] = []  # that the rules refer to

    def of(self, format: AnyFormat) -> str:
        """Return the grammar, as llguidance's list."""
        start = self._part(format, ()) or EMPTY
        whole = "\n".join([f"start: {start}", *self._rules])
        return in_json(Grammar("tags", whole), *self._others)

    def _part(self, format: AnyFormat, ends: Texts) -> str:
        """Return a part and one of `ends` after it; none is that nothing follows."""
        match format:
            case AnyText(excludes):
                return self._free({}, ends, excludes)[1]
            case TriggeredTags():
                return self._triggered(format, ends)
            case Regex(pattern):
                return self._regex(pattern, ends)
            case SequenceFormat(elements):
                return self._sequence(elements, ends)
            case AnyOfFormat(elements):
                return either(self._part(element, ends) for element in elements)
            case Maybe(content):
                return either([self._part(content, ends), self._one_of(ends)])
            case Tag(begin, content) if not format.ends:
                return joined(self._text(begin), self._part(content, ends))
        return joined(self._whole(format), self._one_of(ends))

    def _whole(self, format: AnyFormat) -> str:
        """Return a part that ends by itself."""
        if is_free(format):
            raise GrammarError("free text must have an end: a tag's, or a const_string after it")
        match format:
            case ConstString(value):
                return self._text(value)
            case JsonSchema(schema):
                return json_of(schema)
            case Ebnf(grammar):
                return self._grammar(grammar)
            case Star() | Plus() | Repeat():
                return f"({self._whole(format.content) or EMPTY}){times_of(format)}"
            case Tag(begin, content) if format.ends:
                return joined(self._text(begin), self._part(content, format.ends))
            case SeparatedTags():
                return self._separated(format)
        return self._part(format, ())

    def _sequence(self, elements: list[AnyFormat], ends: Texts) -> str:
        """Return parts in a row; one that is free takes the begin of the next."""
        if not elements:
            return self._one_of(ends)
        parts, is_taken = [], False
        for element, follower in zip(elements, [*elements[1:], None], strict=True):
            left = without_head(element) if is_taken else element
            head = head_of(follower)
            is_taken = bool(head) and (is_free(element) or isinstance(element, Regex))
            if follower is None:
                parts.append(self._part(left, ends))
            elif is_taken:
                parts.append(self._part(left, (head,)))
            else:
                parts.append(self._whole(left))
        return joined(*parts)

    def _triggered(self, format: TriggeredTags, ends: Texts) -> str:
        """Return free text with tags, and one of `ends` after it."""
        for one, other in permutations(format.triggers, 2):
            if one in other:
                raise GrammarError(f"the trigger {one!r} is a part of {other!r}")
        rests: dict[str, list[str]] = {}
        for tag in format.tags:
            stop = self._stop(tag.begin, format.triggers)
            rest = joined(self._text(tag.begin[len(stop) :]), self._content(tag))
            rests.setdefault(stop, []).append(rest)
        named = {stop: self._rule(either(rest)) for stop, rest in rests.items()}
        first = either(joined(self._text(stop), rule) for stop, rule in named.items())
        unused = [trigger for trigger in format.triggers if trigger not in named]
        head, tail = self._free(named, ends, [*format.excludes, *unused])
        match format.at_least_one, format.stop_after_first:
            case True, True:
                return joined(first, self._one_of(ends))
            case False, True:
                return either([joined(head, self._one_of(ends)), tail])
            case _:
                return joined(first if format.at_least_one else "", f"({head})*", tail)

    def _stop(self, begin: str, triggers: list[str]) -> str:
        """Return what of a tag's begin is looked for: a trigger, and all of a token it is in."""
        found = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
        if len(found) != 1:
            raise GrammarError(
                f"the tag {begin!r} begins with {len(found)} of the triggers, not one"
            )
        at, token = special_in(begin, self._special)
        (trigger,) = found
        return begin[: max(len(trigger), at + len(token))] if at < len(trigger) else trigger

    def _free(self, rests: Mapping[str, str], ends: Texts, excludes: list[str]) -> tuple[str, str]:
        """Return free text up to a mark, with the part after it; and free text up to the end.

        Args:
            rests: rules of what comes after each of the texts that are looked for.
        """
        stops = (*rests, *ends)
        tokens = [stop for stop in stops if self._is_token(stop)]
        free = self._terminal(text_without([*stops, *excludes]))
        before = text_without([*tokens, *excludes])
        until = {
            stop: joined(free, self._text(stop))
            if stop in tokens
            else self._lexeme(f"{before} {quoted(stop)}")
            for stop in stops
        }
        head = either(joined(until[stop], rest) for stop, rest in rests.items())
        return head, either(until[end] for end in ends) if ends else free

    def _is_token(self, stop: str) -> bool:
        """Whether a mark begins with a special token."""
        at, _ = special_in(stop, self._special)
        if 0 < at < len(stop):
            raise GrammarError(f"{stop!r} has a special token in it, and does not begin with it")
        return at == 0

    def _separated(self, format: SeparatedTags) -> str:
        tag = self._rule(
            either(joined(self._text(tag.begin), self._content(tag)) for tag in format.tags)
        )
        more = f"({joined(self._text(format.separator), tag)})*"
        tags = tag if format.stop_after_first else joined(tag, more)
        return tags if format.at_least_one else f"({tags})?"

    def _content(self, tag: Tag) -> str:
        """Return what comes after a tag's begin."""
        return self._part(tag.content, tag.ends) if tag.ends else self._whole(tag.content)

    def _regex(self, pattern: str, ends: Texts) -> str:
        from llguidance import LLMatcher

        listed = msgspec.json.decode(LLMatcher.grammar_from_regex(pattern), type=Several)
        regex = (listed.grammars[0].lark_grammar or "").removeprefix("start: ")
        if not ends or any(special_in(end, self._special)[1] for end in ends):
            return joined(regex, self._one_of(ends))
        return self._lexeme(f"{regex} {either(map(quoted, ends))}")

    def _grammar(self, source: str) -> str:
        from llguidance import grammar_from

        name = f"g{len(self._others)}"
        self._others.append(Grammar(name, grammar_from("grammar", source)))
        return f"@{name}"

    def _text(self, text: str) -> str:
        return spelled(text, self._special)

    def _one_of(self, texts: Texts) -> str:
        return either(map(self._text, texts)) if texts else ""

    def _rule(self, what: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {what}")
        return name

    def _terminal(self, what: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {what}")
        return name

    def _lexeme(self, what: str) -> str:
        """Return a lexeme that is complete at its earliest match."""
        name = f"l{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {self._terminal(what)}")
        return name


def is_free(format: AnyFormat) -> bool:
    """Whether a part extends up to the one after it."""
    match format:
        case AnyText():
            return True
        case TriggeredTags():
            return not (format.at_least_one and format.stop_after_first)
        case SequenceFormat(elements):
            return bool(elements) and is_free(elements[-1])
        case AnyOfFormat(elements):
            return any(map(is_free, elements))
        case Maybe(content) | Star(content) | Plus(content):
            return is_free(content)
        case Repeat():
            return is_free(format.content)
        case Tag():
            return not format.ends and is_free(format.content)
    return False


def times_of(format: Star | Plus | Repeat) -> str:
    """Return how often a part may be."""
    if not isinstance(format, Repeat):
        return "+" if isinstance(format, Plus) else "*"
    least, most = format.min, format.max
    if not 0 <= least <= (least if most < 0 else most):
        raise GrammarError(f"repeat from {least} to {most} is no range")
    return f"{{{least},{'' if most < 0 else most}}}"


def head_of(format: AnyFormat | None) -> str:
    """Return the text a part begins with, if it is known."""
    match format:
        case ConstString(value):
            return value
        case Tag(begin):
            return begin
    return ""


def without_head(format: AnyFormat) -> AnyFormat:
    """Return a part without that text."""
    if isinstance(format, ConstString):
        return ConstString("")
    assert isinstance(format, Tag)
    return msgspec.structs.replace(format, begin="")


def json_of(schema: Schema) -> str:
    """Return what JSON of a schema is."""
    if schema is False:
        raise GrammarError("no text matches a schema that is false")
    exactly = {} if schema is True else exact(schema)
    return "%json " + json.dumps({**exactly, "x-guidance": SPACING}, ensure_ascii=False)


def text_without(texts: list[str]) -> str:
    """Return what a text may be that has none of `texts` in it."""
    banned = either(map(quoted, filter(None, texts)))
    return f"({ANYTHING} & ~({ANYTHING} {banned} {ANYTHING}))" if any(texts) else ANYTHING


def either(options: Iterable[str]) -> str:
    """Return one of several."""
    return f"({' | '.join(dict.fromkeys(option or EMPTY for option in options))})"


def joined(*parts: str) -> str:
    """Return one after another."""
    return " ".join(filter(None, parts))
