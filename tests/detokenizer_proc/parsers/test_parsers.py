"""What models write is read as they mean it, however the text comes in parts."""

import gc
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_outputs import (
    CODER,
    DEEPSEEK,
    DSML,
    EXAMPLES,
    FINAL,
    FORMATS,
    GEMMA,
    HARMONY,
    HARMONY_CALLS,
    HARMONY_THOUGHTS,
    HERMES,
    INSIDE,
    KIMI,
    LLAMA,
    MISTRAL,
    PYTHONIC,
    QWEN3,
    Example,
    of_deepseek,
)
from parsed_texts import check_pieces, cut, pieces_of, read

from headrace.detokenizer_proc.parser_selection import READERS, TAGGED_READERS, marks_of, parser_of
from headrace.detokenizer_proc.parsers.json_call import new_call_id
from headrace.detokenizer_proc.parsers.mistral import new_mistral_id
from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Call,
    Content,
    Gathered,
    ToolCallStart,
    gathered,
)
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import (
    HARMONY_MARKS,
    THOUGHT_TOKENS,
    TOOL_MARKS,
    ThoughtFormat,
    ToolFormat,
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.parsing.tools}: {e.text[:40]}")
def test_every_format_is_read_however_it_is_cut(example: Example) -> None:
    expected = example.meaning
    assert read(example.parsing, example.text) == expected
    assert read(example.parsing, *example.text) == expected
    for place in range(1, len(example.text)):
        assert read(example.parsing, *cut(example.text, [place])) == expected


@pytest.mark.parametrize("deep", ["-" * 50_000 + "1", "[" * 50_000, "1+" * 50_000 + "1"])
def test_python_that_is_too_deep_is_content(deep: str) -> None:
    assert read(PYTHONIC, f"[f(a={deep})]") == Gathered(f"[f(a={deep})]", "", [])


CHUNKS = sorted(
    {mark for marks in (TOOL_MARKS | THOUGHT_TOKENS).values() for mark in marks}
    | {
        "<think>",
        "</think>",
        "[f(",
        ")]",
        "a=1",
        "function",
        "f",
        "```json\n",
        "```",
        "<function=f>",
        *("to=functions.f", "analysis", "final", "call:f{", "a:", "functions.f:0", "</"),
        *('invoke name="f">', 'parameter name="a">', "function_calls>"),
    }
    | {"<parameter=a>", "</parameter>", "</function>", '{"name": "f", ', '"arguments": {', '"a": 1'}
    | {
        '"parameters": {',
        "}",
        "}}",
        "]",
        "[",
        "{",
        '"',
        "\\",
        "'",
        ";",
        ", ",
        "\n",
        " ",
        "é😀",
        "<",
    }
)
TEXTS = st.one_of(
    st.lists(st.sampled_from(CHUNKS), max_size=25).map("".join),
    st.sampled_from([example.text for example in EXAMPLES]),
    st.tuples(st.sampled_from([e.text for e in EXAMPLES]), st.sampled_from(CHUNKS)).map("".join),
    st.text(max_size=40),
)


@given(parsing=st.sampled_from(FORMATS), text=TEXTS, places=st.lists(st.integers(0), max_size=20))
def test_however_a_text_is_cut_it_says_the_same(
    parsing: Parsing, text: str, places: list[int]
) -> None:
    whole = read(parsing, text)
    assert read(parsing, *cut(text, places)) == whole
    assert read(parsing, *text) == whole


@given(parsing=st.sampled_from(FORMATS), text=TEXTS)
def test_pieces_are_never_empty_and_calls_come_in_order(parsing: Parsing, text: str) -> None:
    check_pieces(pieces_of(parsing, text))


@given(parsing=st.sampled_from(FORMATS), text=TEXTS)
def test_nothing_is_lost(parsing: Parsing, text: str) -> None:
    """Without a call or a thought, the text is content, byte for byte."""
    told = read(parsing, text)
    if not told.calls and not parsing.thoughts and parsing is not HARMONY_CALLS:
        assert told.text == text


@given(parsing=st.sampled_from(FORMATS), data=st.binary(max_size=200))
def test_random_bytes_break_no_parser(parsing: Parsing, data: bytes) -> None:
    read(parsing, data.decode(errors="replace"))


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,20}", fullmatch=True)


def written(parsing: Parsing, name: str, arguments: dict[str, object]) -> str:
    """Return a call as a model would write it."""
    as_json = json.dumps(arguments, ensure_ascii=False)
    match parsing.tools:
        case ToolFormat.LLAMA3_JSON:
            return f'{{"name": "{name}", "parameters": {as_json}}}'
        case ToolFormat.MISTRAL:
            return f"[TOOL_CALLS]{name}{as_json}"
        case ToolFormat.DEEPSEEK_V3:
            return of_deepseek(f"function<｜tool▁sep｜>{name}\n```json\n{as_json}\n```")
        case _:
            return f'<tool_call>\n{{"name": "{name}", "arguments": {as_json}}}\n</tool_call>'


@given(
    parsing=st.sampled_from([HERMES, LLAMA, MISTRAL, DEEPSEEK, QWEN3]),
    name=NAMES,
    arguments=st.dictionaries(st.text(), JSON_VALUES, max_size=4),
    places=st.lists(st.integers(0), max_size=10),
)
def test_arguments_arrive_as_they_were_written(
    parsing: Parsing, name: str, arguments: dict[str, object], places: list[int]
) -> None:
    text = written(parsing, name, arguments)
    told = read(parsing, *cut(text, places))
    assert told.text == ""
    assert [call[1:3] for call in told.calls] == [(name, json.dumps(arguments, ensure_ascii=False))]


@given(name=NAMES, arguments=st.dictionaries(NAMES, JSON_VALUES, max_size=4))
def test_python_arguments_become_json(name: str, arguments: dict[str, object]) -> None:
    names = {"False", "None", "True", "and", "as", "if", "in", "is", "or", "not", "for", "def"}
    if {name, *arguments} & names:
        return
    text = f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    told = read(PYTHONIC, text)
    if told.calls:  # keywords of Python are no names
        assert json.loads(told.calls[0].arguments) == arguments


def test_arguments_stream_as_they_come() -> None:
    parser = parser_of(HERMES, lambda: "id")
    parser.feed('<tool_call>{"name": "f", "argu')
    assert parser.feed('ments": {"a": "lo') == [
        ToolCallStart(0, "id", "f"),
        Arguments(0, '{"a": "lo'),
    ]
    assert parser.feed("ng") == [Arguments(0, "ng")]
    assert parser.feed('"}}') == [Arguments(0, '"}')]


def test_content_and_thoughts_stream_as_they_come() -> None:
    parser = parser_of(QWEN3)
    assert [piece for part in ("<think>", "a", "b <", "i>") for piece in parser.feed(part)]
    parser.feed("</think>")
    assert parser.feed("c") == [Content("c")]
    assert parser.feed("d <") == [Content("d ")]


def test_one_call_is_returned_without_parallel_calls() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2 + "."
    told = read(Parsing(tools=ToolFormat.HERMES, has_one_call=True), text)
    assert told == Gathered(".", "", [Call("id0", "f", "{}")])


def test_thoughts_can_be_kept_back() -> None:
    parsing = Parsing(thoughts=ThoughtFormat.QWEN3, hides_thoughts=True)
    assert read(parsing, "<think>Hm</think>Yes") == Gathered("Yes", "", [])


def test_ids_are_as_the_models_templates_want_them_back() -> None:
    assert new_call_id() != new_call_id()
    assert new_call_id().startswith("call_")
    (call,) = gathered(parser_of(MISTRAL).feed("[TOOL_CALLS]f{}")).calls
    assert len(call.id) == 9
    assert call.id.isalnum()
    assert new_mistral_id() != new_mistral_id()


def test_kimi_calls_have_the_ids_that_kimi_writes() -> None:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call = (
        '<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>'
    )
    section = begin + call.format("f", 0) + call.format("g.h", 1) + end
    calls = [Call("functions.f:0", "f", '{"a": 1}'), Call("functions.g.h:1", "g.h", '{"a": 1}')]
    for text in (f"Hm</think>So.{section}", f"<think>Hm{section}So."):
        assert read(KIMI, text) == read(KIMI, *text) == Gathered("So.", "Hm", calls)


def test_every_format_has_a_reader() -> None:
    assert {*READERS, *TAGGED_READERS} == set(ToolFormat)
    assert marks_of(None) == frozenset()
    assert marks_of(QWEN3) == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    assert marks_of(GEMMA) == {"<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"}
    assert marks_of(HARMONY_THOUGHTS) == {*HARMONY_MARKS}


@pytest.mark.parametrize("texts", [FORMATS, [e.parsing for e in EXAMPLES]], ids=["fuzzed", "cut"])
def test_every_format_is_cut_and_fuzzed(texts: list[Parsing]) -> None:
    assert {parsing.tools for parsing in texts} >= set(ToolFormat)
    assert {parsing.thoughts for parsing in texts} >= set(ThoughtFormat)


LONG = 8_000
HARD = [
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "' + "\\\\x" * LONG),
    (HERMES, "<tool_call>" * LONG),
    (HERMES, '<tool_call>{"name": "' + "x" * LONG),
    (HERMES, '<tool_call>{"a": ' + "[" * LONG),
    (LLAMA, '{"name": "f", "parameters": {}}; ' * (LONG // 10)),
    (MISTRAL, "[TOOL_CALLS]" * (LONG // 4)),
    (PYTHONIC, "[f(a='" + "x, " * LONG + "')]"),
    (DEEPSEEK, of_deepseek("f<｜tool▁sep｜>{}") * (LONG // 10)),
    (CODER, "<tool_call><function=f>" + "<parameter=a>b</parameter>" * (LONG // 10)),
    (INSIDE, "</think" * LONG),
    (GEMMA, "<|tool_call>call:f{a:" + "[" * LONG),
    (GEMMA, "<|tool_call>call:f{" + 'a:<|"|>b<|"|>,' * (LONG // 10)),
    (HARMONY, "<|channel|>" * LONG),
    (HARMONY, f"{FINAL}a<|end|>" * (LONG // 10)),
    (DSML, '<｜DSML｜invoke name="f">' + '<｜DSML｜parameter name="a">b</' * (LONG // 10)),
    (HERMES, " " * LONG),
]


def cpu_s(parsing: Parsing, text: str) -> float:
    """Return the least of three: what else is collected or runs meanwhile is not the parser's."""
    found = []
    gc.disable()
    for _ in range(3):
        begin = time.process_time()
        read(parsing, *text)
        found.append(time.process_time() - begin)
    gc.enable()
    return min(found)


@pytest.mark.parametrize(("parsing", "text"), HARD)
def test_time_grows_with_the_text_and_no_faster(parsing: Parsing, text: str) -> None:
    """Eight times the text takes at most thirty times as long; quadratic would be 64."""
    eighth = cpu_s(parsing, text[: len(text) // 8])
    assert cpu_s(parsing, text) < 30 * eighth + 0.01
