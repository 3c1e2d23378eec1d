"""What models write is read as they mean it, however the text comes in parts."""

import gc
import itertools
import json
import time
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.detokenizer_proc.parser_selection import READERS, TAGGED_READERS, marks_of, parser_of
from headrace.detokenizer_proc.parsers.json_call import new_call_id
from headrace.detokenizer_proc.parsers.mistral import new_mistral_id
from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Call,
    Content,
    Gathered,
    Piece,
    ToolCallStart,
    gathered,
)
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import TOOL_MARKS, ThoughtFormat, ToolFormat

HERMES = Parsing(tools=ToolFormat.HERMES)
LLAMA = Parsing(tools=ToolFormat.LLAMA3_JSON)
MISTRAL = Parsing(tools=ToolFormat.MISTRAL)
PYTHONIC = Parsing(tools=ToolFormat.PYTHONIC)
DEEPSEEK = Parsing(tools=ToolFormat.DEEPSEEK_V3)
CODER = Parsing(tools=ToolFormat.QWEN3_CODER, string_parameters={"write": ["path", "text"]})
GLM = Parsing(tools=ToolFormat.GLM45, string_parameters={"write": ["path", "text"]})
LFM2 = Parsing(tools=ToolFormat.LFM2)
QWEN3 = Parsing(tools=ToolFormat.HERMES, thoughts=ThoughtFormat.QWEN3)
INSIDE = Parsing(thoughts=ThoughtFormat.DEEPSEEK_R1, begins_inside=True)
FORMATS = [HERMES, LLAMA, MISTRAL, PYTHONIC, DEEPSEEK, CODER, QWEN3, INSIDE]


def pieces_of(parsing: Parsing, *parts: str) -> list[Piece]:
    numbers = itertools.count()
    parser = parser_of(parsing, lambda: f"id{next(numbers)}")
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return pieces + parser.flush()


def read(parsing: Parsing, *parts: str) -> Gathered:
    return gathered(pieces_of(parsing, *parts))


class Example(NamedTuple):
    """A text, and what it is: content, thought, and calls as (name, arguments)."""

    parsing: Parsing
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    thought: str = ""


def of_deepseek(*calls: str) -> str:
    inner = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


CODED = """<tool_call>
<function=write>
<parameter=path>
007
</parameter>
<parameter=text>
line "1"

</think> é
</parameter>
<parameter=mode>
{"a": [1, 2]}
</parameter>
<parameter=force>
True
</parameter>
<parameter=note>
not JSON
</parameter>
</function>
</tool_call>"""
TAGGED = (
    "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a b</arg_value>\n"
    "<arg_key>text</arg_key>\n<arg_value>x < 1\n</arg_value>\n<arg_key>lines</arg_key>\n"
    "<arg_value>[1, 2]</arg_value>\n</tool_call>"
)
ARGS = '{"path": "a b", "text": "x < 1\\n", "lines": [1, 2]}'
WRITTEN = (
    '{"path": "007", "text": "line \\"1\\"\\n\\n</think> é", "mode": {"a": [1, 2]}, '
    '"force": true, "note": "not JSON"}'
)

EXAMPLES = [
    # Hermes
    Example(HERMES, "Hello.\n", "Hello.\n"),
    Example(HERMES, " \n", " \n"),
    Example(
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>", "b": [1]}}\n</tool_call>',
        "",
        (("f", '{"a": "</tool_call>", "b": [1]}'),),
    ),
    Example(
        HERMES,
        'Wait.\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}, "id": 7}</tool_call>\n',
        "Wait.\n",
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    Example(HERMES, '<tool_call>{"name": "f"}</tool_call>', "", (("f", "{}"),)),
    Example(
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>',
        "",
        (("f", '{"a": "é"}'),),
    ),
    Example(HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", (("f", "{}"),)),
    Example(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', "", (("f", '{"a": "x'),)),
    Example(
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>!',
        "}!",
        (("f", '{"a": 1}'),),
    ),
    Example(
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>'
        '<tool_call>{"name": "g", "arguments": {}}',
        "",
        (("f", '{"a": 1'), ("g", "{}")),
    ),
    Example(HERMES, "a <tool_call>\nf(1)\n</tool_call> b", "a <tool_call>\nf(1)\n</tool_call> b"),
    Example(
        HERMES,
        '<tool_call>{"name": "", "arguments": {}}',
        '<tool_call>{"name": "", "arguments": {}}',
    ),
    Example(HERMES, '<tool_call>{"name": "\\ud83d"}', '<tool_call>{"name": "\\ud83d"}'),
    Example(
        HERMES,
        '<tool_call>{"name": "f", "arguments": 5}',
        '<tool_call>{"name": "f", "arguments": 5}',
    ),
    Example(HERMES, "<tool_call", "<tool_call"),
    Example(HERMES, "<tool_call>", "<tool_call>"),
    # Llama 3
    Example(LLAMA, '{"name": "f", "parameters": {"a": "b"}}', "", (("f", '{"a": "b"}'),)),
    Example(
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"a": ";"}}',
        "",
        (("f", "{}"), ("g", '{"a": ";"}')),
    ),
    Example(
        LLAMA,
        'So: <|python_tag|>{"type": "function", "name": "f", "parameters": {}}',
        "So: ",
        (("f", "{}"),),
    ),
    Example(LLAMA, '{"name": "Bo", "age": 3}', '{"name": "Bo", "age": 3}'),
    Example(LLAMA, '{"name": "f"}', '{"name": "f"}'),
    Example(LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    Example(LLAMA, 'a {"name": "f", "parameters": {}}', 'a {"name": "f", "parameters": {}}'),
    Example(LLAMA, '{"name": "f", "parameters": {}}; so', "; so", (("f", "{}"),)),
    Example(LLAMA, '{"name": "f", "parameters": {}} so', " so", (("f", "{}"),)),
    # Mistral
    Example(
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"arguments": {}, "name": "g"}]',
        "",
        (("f", '{"a": "]"}'), ("g", "{}")),
    ),
    Example(
        MISTRAL,
        'Hm.[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123DEF[ARGS]{"b": 2}',
        "Hm.",
        (("f", '{"a": 1}'), ("g", '{"b": 2}')),
    ),
    Example(MISTRAL, "[TOOL_CALLS]f(1)", "[TOOL_CALLS]f(1)"),
    Example(MISTRAL, "[TOOL_CALLS][1]", "[TOOL_CALLS][1]"),
    Example(MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, 1]', " 1]", (("f", "{}"),)),
    # Pythonic
    Example(
        PYTHONIC,
        "[f(a=1, b='x]', c=[True, None, -2.5], d={'k': (1,)}), mod.g()]",
        "",
        (("f", '{"a": 1, "b": "x]", "c": [true, null, -2.5], "d": {"k": [1]}}'), ("mod.g", "{}")),
    ),
    Example(
        PYTHONIC,
        '<|python_start|>[f(a=true, b="\\d\\"é")]<|python_end|>',
        "",
        (("f", '{"a": true, "b": "\\\\d\\"é"}'),),
    ),
    Example(PYTHONIC, "[f(a=1)] Done.", " Done.", (("f", '{"a": 1}'),)),
    Example(PYTHONIC, "[1] as they say", "[1] as they say"),
    Example(PYTHONIC, "[f(a=1)", "[f(a=1)"),
    Example(PYTHONIC, "[f(1)]", "[f(1)]"),
    Example(PYTHONIC, "[f(**a)]", "[f(**a)]"),
    Example(PYTHONIC, "[f(a=g(1))]", "[f(a=g(1))]"),
    Example(PYTHONIC, "[f(a=1e999)]", "[f(a=1e999)]"),
    Example(PYTHONIC, "[f(a='\\ud83d')]", "[f(a='\\ud83d')]"),
    Example(PYTHONIC, "[f()(a=1)]", "[f()(a=1)]"),
    Example(PYTHONIC, "[f(a={1: 2})]", "[f(a={1: 2})]"),
    Example(PYTHONIC, "[f(a=b'x')]", "[f(a=b'x')]"),
    # DeepSeek
    Example(
        DEEPSEEK,
        "Hm."
        + of_deepseek(
            'function<｜tool▁sep｜>f\n```json\n{"a": "```"}\n```',
            "function<｜tool▁sep｜>g\n```json\n{}\n```",
        ),
        "Hm.",
        (("f", '{"a": "```"}'), ("g", "{}")),
    ),
    Example(
        DEEPSEEK,
        of_deepseek('f<｜tool▁sep｜>{"a": 1}', "g<｜tool▁sep｜>{}"),
        "",
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    Example(DEEPSEEK, of_deepseek("f"), of_deepseek("f")),
    Example(DEEPSEEK, of_deepseek(), of_deepseek()),
    # GLM and LFM2
    Example(GLM, f"Now:\n{TAGGED}\n{TAGGED}", "Now:\n", (("write", ARGS), ("write", ARGS))),
    Example(GLM, TAGGED.replace(">\n<", "><"), "", (("write", ARGS),)),
    Example(GLM, "<tool_call>now\n</tool_call>.", ".", (("now", "{}"),)),
    Example(GLM, "<tool_call> is a tag", "<tool_call> is a tag", ()),
    Example(GLM, "<tool_call>f\n<arg_key>a", "a", (("f", ""),)),
    Example(
        LFM2,
        '<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>Done.',
        "Done.",
        (("f", '{"a": 1}'), ("g", '{"b": "x"}')),
    ),
    Example(LFM2, "No call.", "No call.", ()),
    # Qwen3-Coder
    Example(CODER, f"Now:\n{CODED}\n{CODED}", "Now:\n", (("write", WRITTEN), ("write", WRITTEN))),
    Example(CODER, "<function=f></function></tool_call>", "", (("f", "{}"),)),
    Example(CODER, "<tool_call>\n<function=f>\n<para", "\n<para", (("f", ""),)),
    Example(CODER, "<function=f>\n</tool_call>", "", (("f", "{}"),)),
    Example(CODER, CODED[:90], "", (("write", '{"path": "007", "text": "line \\"1\\"\\n\\n'),)),
    Example(CODER, "<tool_call>f</tool_call>", "<tool_call>f</tool_call>"),
    Example(CODER, "<function=>", "<function=>"),
    # Thoughts
    Example(QWEN3, "<think>\nHm\n</think>\n\nYes.", "Yes.", thought="Hm\n"),
    Example(QWEN3, " Yes <think>", " Yes <think>"),
    Example(QWEN3, "<think>Hm", thought="Hm"),
    Example(
        QWEN3,
        '<think></think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "",
        (("f", "{}"),),
    ),
    Example(INSIDE, "Hm</think>Yes", "Yes", thought="Hm"),
    Example(INSIDE, "<think>\nHm</think>Yes", "Yes", thought="Hm"),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.parsing.tools}: {e.text[:40]}")
def test_every_format_is_read_in_one_and_letter_by_letter(example: Example) -> None:
    calls = [Call(f"id{i}", *call) for i, call in enumerate(example.calls)]
    expected = Gathered(example.content, example.thought, calls)
    assert read(example.parsing, example.text) == expected
    assert read(example.parsing, *example.text) == expected


@pytest.mark.parametrize("deep", ["-" * 50_000 + "1", "[" * 50_000, "1+" * 50_000 + "1"])
def test_python_that_is_too_deep_is_content(deep: str) -> None:
    assert read(PYTHONIC, f"[f(a={deep})]") == Gathered(f"[f(a={deep})]", "", [])


CHUNKS = sorted(
    {mark for marks in TOOL_MARKS.values() for mark in marks}
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


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@given(parsing=st.sampled_from(FORMATS), text=TEXTS, places=st.lists(st.integers(0), max_size=20))
def test_however_a_text_is_cut_it_says_the_same(
    parsing: Parsing, text: str, places: list[int]
) -> None:
    whole = read(parsing, text)
    assert read(parsing, *cut(text, places)) == whole
    assert read(parsing, *text) == whole


@given(parsing=st.sampled_from(FORMATS), text=TEXTS)
def test_pieces_are_never_empty_and_calls_come_in_order(parsing: Parsing, text: str) -> None:
    pieces = pieces_of(parsing, text)
    assert all(not isinstance(p, Content | Arguments) or p.text for p in pieces)
    begun = [piece.index for piece in pieces if isinstance(piece, ToolCallStart)]
    assert begun == list(range(len(begun)))
    indices = [p.index for p in pieces if isinstance(p, ToolCallStart | Arguments)]
    assert indices == sorted(indices)


@given(parsing=st.sampled_from(FORMATS), text=TEXTS)
def test_nothing_is_lost(parsing: Parsing, text: str) -> None:
    """Without a call or a thought, the text is content, byte for byte."""
    told = read(parsing, text)
    if not told.calls and not parsing.thoughts:
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


def test_every_format_has_a_reader() -> None:
    assert {*READERS, *TAGGED_READERS} == set(ToolFormat)
    assert marks_of(None) == frozenset()
    assert marks_of(QWEN3) == {"<tool_call>", "</tool_call>", "<think>", "</think>"}


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
