"""A structural tag allows its texts and no others, in each of its shapes."""

import json
import random
from typing import Any

import pytest
from grammars import allows, mark_ids, matcher, some_text

from headrace.ipc.messages import Parsing
from headrace.model.output_formats import ThoughtFormat
from headrace.tokenizer_proc.grammar.grammar_checker import grammar_of
from headrace.tokenizer_proc.grammar.structural_grammar import tag_grammar
from headrace.tokenizer_proc.grammar.thought_grammar import after_thoughts, thoughts_of
from headrace.tokenizer_proc.requests.constraints import Constraint

Format = dict[str, Any]

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ANY: Format = {"type": "any_text"}
NUMBER: Format = {"type": "regex", "pattern": "[0-9]+"}


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Format, end: Any) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


WEATHER = tag("<f=weather>", {"type": "json_schema", "json_schema": CITY}, "</f>")
COUNT = tag("<f=count>", NUMBER, "</f>")


def triggered(**fields: Any) -> Format:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": [WEATHER, COUNT], **fields}


CASES = {
    "const_string": (const('a "b"\n'), ['a "b"\n'], ["", "a", 'a "b"\n ']),
    "json_schema": (
        {"type": "json_schema", "json_schema": CITY},
        ['{"city": "x"}', '{\n  "city": "x", "b": 1}'],
        ["{}", '{"city": 1}', ' {"city": "x"}'],
    ),
    "json_schema true": ({"type": "json_schema", "json_schema": True}, ["1", "[{}]"], ["", "x"]),
    "regex": ({"type": "regex", "pattern": "a/b\\d"}, ["a/b1"], ["ab1", "a/b"]),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["b", "aab"], ["", "a"]),
    "any_text": (ANY, ["", "a\nb", "<f=x"], []),
    "any_text excludes": ({**ANY, "excludes": ["no", "</"]}, ["", "n o </"[:4]], ["x no", "</a"]),
    "sequence": (
        {
            "type": "sequence",
            "elements": [const("a"), NUMBER, {"type": "sequence", "elements": []}],
        },
        ["a1", "a12"],
        ["a", "1"],
    ),
    "sequence after free text": (
        {"type": "sequence", "elements": [ANY, const("Answer: "), NUMBER, const("1."), ANY]},
        ["Answer: 51.", "Hm. Answer: 11.\nYes"],
        ["Hm.", "Answer: x", "Answer: 1.", "Answer: Answer: 21."],
    ),
    "sequence after free text, a tag": (
        {"type": "sequence", "elements": [ANY, COUNT, {"type": "json_schema", "json_schema": {}}]},
        ["x <f=count>1</f>2", '<f=count>1</f>""'],
        ["<f=weather>", "<f=count>1</f>", "<f=count>x</f>2"],
    ),
    "or": ({"type": "or", "elements": [const("yes"), NUMBER]}, ["yes", "1"], ["", "yes1"]),
    "or in a tag": (
        tag("<t>", {"type": "or", "elements": [const("yes"), {**ANY, "excludes": ["no"]}]}, "</t>"),
        ["<t>yes</t>", "<t>maybe</t>", "<t></t>"],
        ["<t>no</t>", "<t>maybe</t>x"],
    ),
    "optional": (
        {"type": "sequence", "elements": [{"type": "optional", "content": const("a")}, NUMBER]},
        ["1", "a1"],
        ["aa1", "a"],
    ),
    "optional free text": (
        tag("<t>", {"type": "optional", "content": ANY}, "</t>"),
        ["<t></t>", "<t>x</t>"],
        ["<t>"],
    ),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "a"]),
    "star": ({"type": "star", "content": WEATHER}, ["", '<f=weather>{"city":""}</f>' * 2], ["x"]),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": NUMBER}, ["1", "12"], [""]),
    "repeat without bound": (
        {"type": "repeat", "min": 2, "max": -1, "content": const("a")},
        ["aa", "aaaa"],
        ["a"],
    ),
    "tag of free text": (
        tag("<think>", ANY, "</think>"),
        ["<think></think>", "<think>a < b </thin</think>"],
        ["<think>", "<think></think> ", "<think></think></think>"],
    ),
    "tag with several ends": (
        tag("[", ANY, ["]", ")"]),
        ["[a]", "[a)", "[]"],
        ["[a", "[a]]", "[a])"],
    ),
    "tag of an expression": (
        tag("<", {"type": "regex", "pattern": "[a-z;]+"}, ";>"),
        ["<a;>", "<a;b;>"],
        ["<a>", "<;>", "<a;>;>"],
    ),
    "tag without an end": (tag("Final: ", NUMBER, ""), ["Final: 12"], ["Final: "]),
    "tag of free text without an end": (tag("x", ANY, ""), ["x", "xyz"], ["", "y"]),
    "triggered_tags": (
        triggered(),
        [
            "",
            "Nothing to call.",
            '<f=weather>{"city": "Oslo"}</f>',
            'a <f <f=count>12</f> b <f=weather>{"city": "</f>"}</f> c<f',
            "<<f=count>1</f><f=count>2</f>",
        ],
        ["<f=", "<f=other>1</f>", "x<f=count></f>", "<f=count>1</f> <f=", "<f=count>1"],
    ),
    "triggered_tags at_least_one": (
        triggered(at_least_one=True),
        ["<f=count>1</f>", "<f=count>1</f> and <f=count>2</f>!"],
        ["", "x", "x<f=count>1</f>", "<f=count>1</f><f="],
    ),
    "triggered_tags stop_after_first": (
        triggered(stop_after_first=True),
        ["", "x", "x<f=count>1</f>"],
        ["<f=count>1</f>x", "<f=count>1</f><f=count>1</f>"],
    ),
    "triggered_tags both": (
        triggered(at_least_one=True, stop_after_first=True),
        ["<f=count>1</f>"],
        ["", "x<f=count>1</f>", "<f=count>1</f>x"],
    ),
    "triggered_tags excludes": (triggered(excludes=["bad"]), ["ba<f=count>1</f>"], ["bad"]),
    "triggered_tags of two triggers": (
        triggered(triggers=["<f=w", "<f=c"]),
        ["<f= <f=x", "a<f=count>1</f>b"],
        ["<f=counter", "<f=w"],
    ),
    "triggered_tags with a trigger of no tag": (
        triggered(triggers=["<f=", "[x]"]),
        ["a [x <f=count>1</f>"],
        ["a [x]"],
    ),
    "triggered_tags in a tag": (
        tag("<r>", triggered(), "</r>"),
        ["<r></r>", "<r>a <f=count>1</f> b</r>"],
        ["<r>a", "<r></r>x", "<r><f=</r>", "<r><f=count>1</f>"],
    ),
    "triggered_tags in a tag, stop_after_first": (
        tag("<r>", triggered(stop_after_first=True), "</r>"),
        ["<r>a</r>", "<r>a<f=count>1</f></r>"],
        ["<r>a<f=count>1</f>b</r>"],
    ),
    "thoughts, then tags": (
        {"type": "sequence", "elements": [tag("<think>", ANY, "</think>"), triggered()]},
        ["<think>Hm <f= </think>", "<think></think>a<f=count>1</f>b"],
        ["a", "<think></think><f="],
    ),
    "tags_with_separator": (
        {"type": "tags_with_separator", "tags": [WEATHER, COUNT], "separator": ", "},
        ["", "<f=count>1</f>", '<f=count>1</f>, <f=weather>{"city":""}</f>, <f=count>2</f>'],
        ["x", "<f=count>1</f>,", "<f=count>1</f><f=count>1</f>"],
    ),
    "tags_with_separator, just one": (
        {
            "type": "tags_with_separator",
            "tags": [COUNT],
            "separator": ",",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<f=count>1</f>"],
        ["", "<f=count>1</f>,<f=count>1</f>"],
    ),
    "special tokens": (
        triggered(triggers=["<tool_call>"], tags=[tag("<tool_call>\n", NUMBER, "\n</tool_call>")]),
        ["a", "a <tool_call>\n12\n</tool_call> b<tool_call>\n3\n</tool_call>"],
        ["<tool_call>", "<tool_call>12\n</tool_call>", "</tool_call>", "<tool_call>\n12\n"],
    ),
    "a trigger within a special token": (
        triggered(triggers=["<tool"], tags=[tag("<tool_call>", NUMBER, "</tool_call>")]),
        ["a <too", "<tool_call>1</tool_call>"],
        ["<tool_call>x", "<tool"],
    ),
    "free text up to a special token": (
        tag("[THINK]", ANY, "[/THINK]"),
        ["[THINK]Hm [/THIN[/THINK]"],
        ["[THINK]Hm", "[THINK]Hm[/THINK]."],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_format_allows_its_texts_and_no_others(name: str) -> None:
    format, right, wrong = CASES[name]
    grammar = tag_grammar(json.dumps({"format": format}), mark_ids())
    assert [text for text in right if allows(grammar, text)] == right
    assert [text for text in wrong if allows(grammar, text)] == []


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_can_be_written(name: str) -> None:
    """Whatever is drawn, there is a way on, and an end."""
    format, right, _ = CASES[name]
    found = matcher(tag_grammar(json.dumps({"format": format}), mark_ids()))
    for seed in range(3):
        found.reset()
        some_text(found, random.Random(seed), (*right, "</f>", "]", "</t>", ";>", "</think>"))


def test_the_first_shape_is_one_of_triggered_tags() -> None:
    structure = {"begin": "<f=weather>", "schema": CITY, "end": "</f>"}
    for schema in (CITY, json.dumps(CITY)):
        structures = [structure | {"schema": schema}]
        source = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
        grammar = tag_grammar(json.dumps(source), {})
        assert allows(grammar, 'Well: <f=weather>{"city": "Oslo"}</f>.')
        assert allows(grammar, "Well.")
        assert not allows(grammar, "<f=weather>{}</f>")


def test_schemas_are_followed_exactly() -> None:
    content = {"type": "json_schema", "json_schema": {"type": "string", "format": "date"}}
    grammar = tag_grammar(json.dumps({"format": tag("<", content, ">")}), {})
    assert allows(grammar, '<"2024-02-29">')
    assert not allows(grammar, '<"2023-02-29">')


def test_it_comes_after_thoughts() -> None:
    ebnf = {"type": "grammar", "grammar": 'root ::= "a" | "b"'}
    constraint = Constraint("structural_tag", json.dumps({"format": tag("<t>", ebnf, "</t>")}))
    thoughts = thoughts_of(Parsing(thoughts=ThoughtFormat.QWEN3), mark_ids())
    grammar = after_thoughts(thoughts, grammar_of(constraint), is_lark=False)
    assert allows(grammar, "<think>\n<t>\n</think>\n\n<t>b</t>")
    assert allows(grammar, "<t>a</t>")
    assert not allows(grammar, "<think>\n<t>a</t>")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{", "no structural tag: "),
        ("{}", "tag: format: is required"),
        ({"format": {}}, "format.type: is required"),
        ({"format": {"type": "token", "token": 1}}, "'token'"),
        ({"format": {**ANY, "max_tokens": 3}}, "format.max_tokens"),
        (
            {"format": {"type": "const_string", "value": "a", "more": 1}},
            "format.more: is not a known field",
        ),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "qwen_xml"),
        ({"format": {"type": "json_schema", "json_schema": False}}, "false"),
        ({"format": {"type": "json_schema", "json_schema": {"pattern": "(?=a)"}}}, "pattern"),
        ({"format": tag({"type": "token"}, ANY, "x")}, "must be a string, not an object"),  # type: ignore[arg-type]
        ({"format": triggered(triggers=["<x"])}, "begins with 0 of the triggers"),
        ({"format": triggered(triggers=["<f=", "<f=c"])}, "is a part of"),
        ({"format": {"type": "star", "content": ANY}}, "must have an end"),
        ({"format": {"type": "sequence", "elements": [ANY, NUMBER]}}, "must have an end"),
        ({"format": triggered(tags=[tag("<f=x>", ANY, "")])}, "must have an end"),
        ({"format": {"type": "repeat", "min": 2, "max": 1, "content": NUMBER}}, "no range"),
        ({"format": tag("", ANY, "x<tool_call>")}, "special token"),
        ({"structures": [{"begin": "a"}], "triggers": []}, "structures[0].end: is required"),
        ({"structures": []}, "triggers: is required"),
        ({"structures": [{"begin": "a", "end": "b", "schema": "{"}], "triggers": ["a"]}, "tag: "),
    ],
)
def test_what_cannot_be_followed_is_refused(source: Any, why: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        tag_grammar(source if isinstance(source, str) else json.dumps(source), mark_ids())
    assert why in str(refused.value)
