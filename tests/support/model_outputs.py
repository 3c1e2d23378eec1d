"""Texts as models write them, and what they are: content, thoughts and calls."""

from typing import NamedTuple

from msgspec.structs import replace

from headrace.detokenizer_proc.parsers.pieces import Call, Gathered
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import ThoughtFormat, ToolFormat

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
DSML = Parsing(tools=ToolFormat.DEEPSEEK_V32, string_parameters={"write": ["path"]})
MINIMAX = Parsing(tools=ToolFormat.MINIMAX_M2, string_parameters={"write": ["path", "text"]})
SEED = Parsing(
    tools=ToolFormat.SEED_OSS,
    thoughts=ThoughtFormat.SEED_OSS,
    string_parameters={"write": ["path"]},
)
KIMI = Parsing(tools=ToolFormat.KIMI_K2, thoughts=ThoughtFormat.KIMI_K2, begins_inside=True)
GEMMA = Parsing(tools=ToolFormat.GEMMA4, thoughts=ThoughtFormat.GEMMA4)
HARMONY = Parsing(tools=ToolFormat.HARMONY, thoughts=ThoughtFormat.HARMONY)
HARMONY_CALLS = Parsing(tools=ToolFormat.HARMONY)
HARMONY_THOUGHTS = Parsing(thoughts=ThoughtFormat.HARMONY)
MAGISTRAL = Parsing(tools=ToolFormat.MISTRAL, thoughts=ThoughtFormat.MISTRAL)
DEEPSEEK_V31 = Parsing(
    tools=ToolFormat.DEEPSEEK_V31, thoughts=ThoughtFormat.DEEPSEEK_R1, begins_inside=True
)
THINKERS = {  # such as Qwen3.5: their calls come behind thoughts, which a template has begun
    parsing.tools: replace(parsing, thoughts=ThoughtFormat.QWEN3, begins_inside=True)
    for parsing in (CODER, GLM, DSML, MINIMAX)
}
FORMATS = [HERMES, LLAMA, MISTRAL, PYTHONIC, DEEPSEEK, CODER, QWEN3, INSIDE, DSML, MINIMAX, KIMI]
FORMATS += [SEED, GLM, LFM2, GEMMA, HARMONY, HARMONY_CALLS, HARMONY_THOUGHTS]
FORMATS += [MAGISTRAL, DEEPSEEK_V31, *THINKERS.values()]


class Example(NamedTuple):
    """A text, and what it is: content, thought, and calls as (name, arguments)."""

    parsing: Parsing
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    thought: str = ""

    @property
    def meaning(self) -> Gathered:
        """What is read of it. Calls are named id0, id1 and so on; Kimi writes its own names."""
        name = "functions.{1}:{0}" if self.parsing.tools is ToolFormat.KIMI_K2 else "id{0}"
        calls = [Call(name.format(i, call[0]), *call) for i, call in enumerate(self.calls)]
        return Gathered(self.content, self.thought, calls)


def of_deepseek(*calls: str) -> str:
    inner = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def of_kimi(*names: str) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for place, name in enumerate(names)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


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

WRITE = (
    '<invoke name="write">\n<parameter name="path">a b</parameter>\n'
    '<parameter name="text">x < 1\n</parameter>\n<parameter name="lines">[1, 2]</parameter>\n'
    "</invoke>"
)
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def in_tags(mark: str, section: str, *lines: str) -> str:
    """Return calls between the tags of a section, each with `mark` before its name."""
    text = "\n".join([f"<{section}>", *lines, f"</{section}>"])
    for name in (section, "invoke", "parameter"):
        text = text.replace(f"<{name}", f"<{mark}{name}").replace(f"</{name}", f"</{mark}{name}")
    return text


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
    Example(
        MAGISTRAL,
        '[THINK]Hm.[/THINK]So.[TOOL_CALLS]f[ARGS]{"a": 1}',
        "So.",
        (("f", '{"a": 1}'),),
        "Hm.",
    ),
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
    Example(
        DEEPSEEK_V31,
        "Hm</think>So." + of_deepseek('f<｜tool▁sep｜>{"a": 1}', "g<｜tool▁sep｜>{}"),
        "So.",
        (("f", '{"a": 1}'), ("g", "{}")),
        "Hm",
    ),
    Example(DEEPSEEK, of_deepseek("f"), of_deepseek("f")),
    Example(DEEPSEEK, of_deepseek(), of_deepseek()),
    # Kimi
    Example(KIMI, f"Hm</think>So.{of_kimi('f', 'g.h')}", "So.", (("f", "{}"), ("g.h", "{}")), "Hm"),
    Example(KIMI, f"<think>Hm{of_kimi('f')} So", " So", (("f", "{}"),), "Hm"),
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
    # MiniMax M2 and DeepSeek V3.2
    Example(
        MINIMAX,
        "So.\n" + in_tags("", "minimax:tool_call", WRITE, '<invoke name="now">', "</invoke>"),
        "So.\n",
        (("write", ARGS), ("now", "{}")),
    ),
    Example(MINIMAX, '<minimax:tool_call>\n<invoke name="f">\n', "\n", (("f", ""),)),
    Example(MINIMAX, '<invoke name="', '<invoke name="'),
    # Seed-OSS
    Example(
        SEED,
        "<seed:think>\nHm</seed:think>\nSo.\n<seed:tool_call>\n<function=write>\n"
        "<parameter=path>a\n b\n</parameter>\n<parameter=n>[1]</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        "So.\n",
        (("write", '{"path": "a\\n b\\n", "n": [1]}'), ("now", "{}")),
        "Hm",
    ),
    Example(SEED, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    Example(
        DSML,
        "\n\n"
        + in_tags(
            "｜DSML｜",
            "function_calls",
            WRITE.replace('h">', 'h" string="true">').replace('t">', 't" string="true">'),
        ),
        "",
        (("write", ARGS),),
    ),
    Example(
        DSML,
        in_tags(
            "｜DSML｜",
            "function_calls",
            '<invoke name="write">\n<parameter name="path" '
            'string="false">7</parameter>\n<parameter name="path">7</parameter>\n</invoke>',
        ),
        "",
        (("write", '{"path": 7, "path": "7"}'),),
    ),
    Example(DSML, "<｜DSML｜function_calls>", "<｜DSML｜function_calls>"),
    # Gemma 4
    Example(
        GEMMA,
        '<|channel>thought\nHm<channel|>So.<|tool_call>call:f{a:<|"|>x, {"}<|"|>,b:[1,true,'
        '{c:<|"|><|"|>}],<|"|>d e<|"|>:None, g:{} }<tool_call|><|tool_call>call:g.h{}<tool_call|>',
        "So.",
        (
            ("f", '{"a": "x, {\\"}", "b": [1, true, {"c": ""}], "d e": null, "g": {}}'),
            ("g.h", "{}"),
        ),
        "Hm",
    ),
    Example(GEMMA, "<|channel>thought\n<channel|>Yes.", "Yes."),
    Example(GEMMA, '<|tool_call>call:f{a:<|"|>x', "", (("f", '{"a": "x'),)),
    Example(GEMMA, "<|tool_call>call:f{a:}<tool_call|>", "}<tool_call|>", (("f", '{"a": '),)),
    Example(GEMMA, "<|tool_call>f{}", "<|tool_call>f{}"),
    # Harmony
    Example(
        HARMONY,
        f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        f"<|start|>assistant{CALL}" + '{"a": "<|end>"}<|call|><|start|>assistant to=functions.g'
        "<|channel|>commentary json<|message|><|call|>",
        "Let me see.",
        (("f", '{"a": "<|end>"}'), ("g", "{}")),
        "Hm.",
    ),
    Example(HARMONY, f"{ANALYSIS}Hm<|end|><|start|>assistant{FINAL}Yes", "Yes", thought="Hm"),
    Example(HARMONY, f"{ANALYSIS}Hm<|start|>assistant{FINAL}Yes", "Yes", thought="Hm"),
    Example(HARMONY, f"{ANALYSIS}a<|end|>{ANALYSIS}b<|end|>{FINAL}Yes", "Yes", thought="ab"),
    Example(HARMONY, " and so on.<|end|>", " and so on."),
    Example(HARMONY, f"{FINAL}Yes<|end|><|start|>assist", "Yes<|start|>assist"),
    Example(HARMONY_CALLS, f"{ANALYSIS}Hm<|end|>{CALL}" + "{}", "Hm", (("f", "{}"),)),
    Example(HARMONY_THOUGHTS, f"{ANALYSIS}Hm<|end|>{CALL}" + "{}", "{}", thought="Hm"),
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
EXAMPLES += [
    example._replace(parsing=thinker, text=f"Hm\n</think>\n\n{example.text}", thought="Hm\n")
    for example in EXAMPLES
    if example.parsing.thoughts is None and (thinker := THINKERS.get(example.parsing.tools))
]
