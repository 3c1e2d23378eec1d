"""A pattern means in Rust what it means in ECMAScript."""

import json

import pytest
from grammars import allows

from headrace.tokenizer_proc.grammar.grammar_checker import grammar_of
from headrace.tokenizer_proc.grammar.schema_patterns import rust_pattern
from headrace.tokenizer_proc.requests.constraints import of_schema


def matches(pattern: str, text: str) -> bool:
    """Whether a string of a schema with the pattern may have the text."""
    grammar = grammar_of(of_schema({"type": "string", "pattern": pattern}, ""))
    return allows(grammar, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^.$", "a😀é ", "\n\r\u2028\u2029"),
        (r"^\s$", " \t\n\v\f\r\xa0\u2003\u3000\ufeff", "a\x85\u200b"),
        (r"^\S$", "a\x85\u200b", " \t\n\r\ufeff"),
        (r"^[^\s]$", "a\x85", " \ufeff"),
        (r"^[^\S]$", " \ufeff", "a\x85"),
        (r"^[\S ]$", "a ", "\t\ufeff"),
        (r"^\d$", "059", "a\u0663"),
        (r"^\D$", "a\u0663", "059"),
        (r"^[\d.]$", "5.", "a\u0663"),
        (r"^\w$", "aZ_0", "é-"),
        (r"^[^\w]$", "é-", "aZ_0"),
        (r"^[\Wa]$", "é-a", "bZ_0"),
        (r"^[[a]$", "[a", "]b"),
        (r"^[a&&b]$", "a&b", "c"),
        (r"^[a~~b]$", "a~b", "c"),
        (r"^[a\-c]$", "a-c", "b"),
        (r"^[a-]$", "a-", "b"),
        (r"^[-a]$", "a-", "b"),
        (r"^[+--]$", "+,-", "."),
        (r"^[^-a]$", "b", "-a"),
        (r"^[a-c]$", "abc", "-d"),
        (r"^[\]]$", "]", "\\["),
        (r"^[\b]$", "\b", "b"),
        (r"^\t|\v$", "\t\v", "tv"),
        (r"^\cJ$", "\n", "Jc"),
        (r"^\0$", "\0", "0"),
        (r"^\x41\u0042?$", "A", "xB"),
        (r"^\u00e9$", "é", "e"),
        (r"^\ud83d\ude00$", "😀", "d"),
        (r"^\u{1F600}$", "😀", "u"),
        (r"^\/\.\-\_\@$|^\"$", '"', "/"),
        (r"^\p{L}$", "aé", "1"),
        (r"^[\p{Lu}1]$", "A1", "a"),
        (r"^\P{Script=Greek}$", "a", "\u03b1"),
        ("^(?:a|b)$", "ab", "c"),
        ("^(?<x>a)$", "a", "x"),
        ("^(?i)a$", "aA", "b"),
        ("^(?i:[a])$", "aA", "b"),
        ("^{|}|]$", "{}]", "x"),
        ("^a#b$|^ $", " ", "a"),
    ],
)
def test_a_pattern_matches_what_it_does_in_ecmascript(pattern: str, right: str, wrong: str) -> None:
    assert [c for c in right if matches(pattern, c)] == list(right)
    assert [c for c in wrong if matches(pattern, c)] == []


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("a", "bab", "b"),
        ("^a|b$", "ax", "xa"),
        ("^a{2}$", "aa", "a"),
        ("^a{2,}$", "aaa", "a"),
        ("^a{1,2}?$", "aa", "aaa"),
        ("^a{,2}$", "a{,2}", "a"),
        ("^[[a]]$", "a]", "a"),
        ("^a$", "a", "a\n"),
        ("^x{41}$", "x" * 41, "A"),
    ],
)
def test_parts_are_put_together_as_in_ecmascript(pattern: str, right: str, wrong: str) -> None:
    assert matches(pattern, right)
    assert not matches(pattern, wrong)


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("(?=a)", "(?="),
        ("(?!a)", "(?!"),
        ("(?<=a)b", "(?<"),
        ("(?x) a", "(?x"),
        (r"\Aa", r"\A"),
        (r"a\Z", r"\Z"),
        (r"\bfoo\b", r"\b"),
        (r"(a)\1", r"\1"),
        (r"\h", r"\h"),
        (r"\x{41}", r"\x"),
        (r"\01", r"\0"),
        (r"\ud800", r"\ud800"),
        (r"\u{110000}", r"\u{110000}"),
        ("[b-a]", "-"),
        (r"[a-\d]", "-"),
        ("[]", "[]"),
        ("[a", "[a"),
        ("a\\", "\\"),
    ],
)
def test_what_has_no_counterpart_is_named(pattern: str, part: str) -> None:
    with pytest.raises(ValueError, match=r"^not supported in a pattern: ") as refused:
        rust_pattern(pattern)
    assert part in str(refused.value)
