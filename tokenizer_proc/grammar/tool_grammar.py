"""The grammar of an answer that calls tools, or may: because `tool_choice` demands a call, or
beside what the text has to be otherwise.

It is llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance, docs/syntax.md), and
writes calls as the model's chat template does; `detokenizer_proc/parsers/` reads them.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from headrace.errors import InvalidValue, Unsupported
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import TOOL_MARKS, ToolFormat
from headrace.tokenizer_proc.grammar.argument_rules import (
    DEFINITIONS,
    Schema,
    json_value,
    listed_arguments,
    properties_of,
)
from headrace.tokenizer_proc.grammar.gemma_values import GEMMA_QUOTE, GemmaValues
from headrace.tokenizer_proc.grammar.grammar_errors import reworded
from headrace.tokenizer_proc.requests.constraints import (
    MAX_GRAMMAR_CHARACTERS,
    Constraint,
    quoted,
    special_in,
    spelled,
)
from headrace.tokenizer_proc.requests.tools import Tool, is_string

NAME = "\N{NULL}"  # in the place of a function's or parameter's name
INDEX = "\N{START OF TEXT}"  # in the place of a number
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
BY_PYTHON = (ToolFormat.PYTHONIC, ToolFormat.LFM2)
IS_STRING = "\N{START OF HEADING}"  # in the place of whether a value is a string
# Before and behind the value of a parameter.
TAGS = {
    ToolFormat.QWEN3_CODER: (f"<parameter={NAME}>\n", "\n</parameter>"),
    ToolFormat.GLM45: (f"<arg_key>{NAME}</arg_key>\n<arg_value>", "</arg_value>"),
    ToolFormat.SEED_OSS: (f"<parameter={NAME}>", "</parameter>"),
    ToolFormat.MINIMAX_M2: (f'<parameter name="{NAME}">', "</parameter>"),
    ToolFormat.DEEPSEEK_V32: (
        f'<｜DSML｜parameter name="{NAME}" string="{IS_STRING}">',
        "</｜DSML｜parameter>",
    ),
}
BY_PARAMETER = (*BY_PYTHON, *TAGS, ToolFormat.GEMMA4)  # a grammar each, not one of all


class Writing(NamedTuple):
    """The text around and between calls, and around the arguments of each."""

    head: str
    tail: str
    between: str = ""
    begin: str = ""
    end: str = ""


WRITINGS = {
    ToolFormat.HERMES: Writing(
        f'<tool_call>\n{{"name": "{NAME}", "arguments": ', "}\n</tool_call>", "\n"
    ),
    ToolFormat.QWEN3_CODER: Writing(
        f"<tool_call>\n<function={NAME}>\n", "</function>\n</tool_call>", "\n"
    ),
    ToolFormat.SEED_OSS: Writing(
        f"<seed:tool_call>\n<function={NAME}>\n", "</function>\n</seed:tool_call>", "\n"
    ),
    ToolFormat.LLAMA3_JSON: Writing(f'{{"name": "{NAME}", "parameters": ', "}", "; "),
    ToolFormat.MISTRAL: Writing(
        f'{{"name": "{NAME}", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"
    ),
    ToolFormat.PYTHONIC: Writing(f"{NAME}(", ")", ", ", "[", "]"),
    ToolFormat.DEEPSEEK_V3: Writing(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    ToolFormat.DEEPSEEK_V31: Writing(
        f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    ToolFormat.GLM45: Writing(f"<tool_call>{NAME}\n", "</tool_call>", "\n"),
    ToolFormat.LFM2: Writing(f"{NAME}(", ")", ", ", "<|tool_call_start|>[", "]<|tool_call_end|>"),
    ToolFormat.MINIMAX_M2: Writing(
        f'<invoke name="{NAME}">\n',
        "</invoke>\n",
        "",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    ToolFormat.DEEPSEEK_V32: Writing(
        f'<｜DSML｜invoke name="{NAME}">\n',
        "</｜DSML｜invoke>\n",
        "",
        "<｜DSML｜function_calls>\n",
        "</｜DSML｜function_calls>",
    ),
    ToolFormat.KIMI_K2: Writing(
        f"<|tool_call_begin|>functions.{NAME}:{INDEX}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    ToolFormat.GEMMA4: Writing(f"<|tool_call>call:{NAME}{{", "}<tool_call|>"),
    ToolFormat.HARMONY: Writing(
        f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>",
        "",
        "<|call|><|start|>assistant",
    ),
}


def demanded_calls(
    tools: list[Tool], parsing: Parsing, special_tokens: Mapping[str, int]
) -> tuple[str, Constraint]:
    """Return the grammar of an answer that must call some of `tools`, and the field that requires
    it.

    Raises:
        Unsupported, InvalidValue: there is no such grammar, or it is too large.
    """
    return "tool_choice", Constraint("lark", grammar_of_calls(tools, parsing, special_tokens))


def or_calls_of(
    tools: list[Tool],
    constraint: tuple[str, Constraint],
    parsing: Parsing,
    special_tokens: Mapping[str, int],
) -> tuple[str, Constraint]:
    """Return what an answer has to be that may call some of `tools` instead, and its field.

    Arguments follow a tool's schema where a grammar can follow it; else they are JSON under the
    names of its parameters. A structural tag stays as it is: it says itself where calls are.

    Raises:
        Unsupported, InvalidValue: there is no such grammar, or it is too large.
    """
    param, wanted = constraint
    if wanted.kind == "structural_tag":
        return constraint
    loose = grammar_of_calls(list(map(loosened, tools)), parsing, special_tokens, wanted.space)
    calls = [loose]
    with contextlib.suppress(InvalidValue, Unsupported):
        calls.insert(0, grammar_of_calls(tools, parsing, special_tokens, wanted.space))
    return param, msgspec.structs.replace(wanted, calls=tuple(calls))


def grammar_of_calls(
    tools: list[Tool], parsing: Parsing, special_tokens: Mapping[str, int], space: str | None = None
) -> str:
    """Return the grammar of calls of some of `tools`; see `ToolGrammar`."""
    assert parsing.tools is not None
    marks = TOOL_MARKS[parsing.tools]
    special = {mark: special_tokens[mark] for mark in marks if mark in special_tokens}
    if parsing.tools in BY_PARAMETER:
        check_size(sum(map(size_of_definitions, tools)))
    try:
        source = ToolGrammar(parsing.tools, special, space).of(tools, not parsing.has_one_call)
    except (ValueError, RecursionError) as error:
        why = reworded(error, Constraint("json_schema", ""))
        raise InvalidValue(f"tools: {why}", "tools") from error
    check_size(len(source))
    return source


def check_size(size: int) -> None:
    """Refuse tools whose grammar has so many characters."""
    if size > MAX_GRAMMAR_CHARACTERS:
        raise InvalidValue(
            f"tools: must have at most {MAX_GRAMMAR_CHARACTERS} characters where a grammar holds "
            f"calls, not {size}",
            "tools",
        )


def size_of_definitions(tool: Tool) -> int:
    """Return how many characters the definitions take that each parameter of a tool repeats."""
    schema = tool.function.parameters or {}
    shared = {name: schema[name] for name in DEFINITIONS if name in schema}
    return len(json.dumps(shared)) * len(properties_of(schema)) if shared else 0


def loosened(tool: Tool) -> Tool:
    """Return a tool whose parameters are reduced to names and whether they are strings."""
    properties = {
        name: {"type": "string"} if is_string(one) else {}
        for name, one, _ in properties_of(tool.function.parameters or {})
    }
    needed = [
        name for name, _, is_needed in properties_of(tool.function.parameters or {}) if is_needed
    ]
    schema = {"type": "object", "properties": properties, "required": needed}
    function = msgspec.structs.replace(tool.function, parameters=schema)
    return msgspec.structs.replace(tool, function=function)


class ToolGrammar:
    """Makes grammars for one model.

    Args:
        special: the ids of marks that are special tokens; others are written as text.
        space: what may be between the parts of an answer in JSON that may be in the place of calls.
            llguidance's lexer does not look back, so calls that are JSON are then spaced alike.
    """

    def __init__(
        self, format: ToolFormat, special: Mapping[str, int], space: str | None = None
    ) -> None:
        self._format = format
        self._special = special
        self._space = space if format is ToolFormat.LLAMA3_JSON else None

    def of(self, tools: list[Tool], may_repeat: bool) -> str:
        """Return the grammar of calls of `tools`, one or several.

        Raises:
            Unsupported: a parameter cannot be written in this format.
        """
        writing = WRITINGS[self._format]
        rules = []
        for index, tool in enumerate(tools):
            if self._space is not None:
                value = json_value(call_schema(tool), spacing_of(self._space))
                rules.append(f"c{index}: {value}")
                continue
            head = writing.head.replace(NAME, tool.function.name)
            call = self._joined(self._text(head), f"a{index}", self._text(writing.tail))
            rules.append(f"c{index}: {call}")
            rules += self._arguments(f"a{index}", tool.function.parameters or NO_ARGUMENTS)
        rules.append("call: " + " | ".join(f"c{index}" for index in range(len(tools))))
        more = f"({self._joined(self._text(writing.between), 'call')})*" if may_repeat else ""
        calls = self._joined(self._text(writing.begin), "call", more, self._text(writing.end))
        return "\n".join([f"start: {calls}", *rules])

    def _arguments(self, rule: str, schema: Schema) -> list[str]:
        """Return the rules of a tool's arguments."""
        if self._format in BY_PYTHON:
            return listed_arguments(rule, schema, "=", ", ", python_value)
        if self._format is ToolFormat.GEMMA4:
            quote = self._text(GEMMA_QUOTE)
            return GemmaValues(rule, quote, self._free_text).arguments(rule, schema)
        if self._format in TAGS:
            return self._tagged_arguments(rule, schema)
        return [f"{rule}: {json_value({'type': 'object'} | schema)}"]

    def _tagged_arguments(self, rule: str, schema: Schema) -> list[str]:
        """Return the rules of parameters, each between its tags."""
        before, behind = TAGS[self._format]
        end = self._text(behind)
        names, rules = [], []
        for index, (name, one, is_needed) in enumerate(properties_of(schema)):
            parameter, value = f"{rule}_parameter{index}", f"{rule}_value{index}"
            names.append(parameter if is_needed else f"{parameter}?")
            kind = "true" if is_string(one) else "false"
            begin = self._text(before.replace(NAME, name).replace(IS_STRING, kind))
            if is_string(one) and "enum" in one:
                texts = " | ".join(quoted(str(text)) for text in one["enum"])
                rules.append(f'{parameter}: {begin} ({texts}) {end} "\\n"')
                continue
            if not is_string(one):
                rules.append(f'{parameter}: {begin} {value} {end} "\\n"')
                rules.append(f"{value}: {json_value(one)}")
                continue
            free, rest = self._free_text(value, behind)
            rules += [f'{parameter}: {" ".join(filter(None, (begin, value, rest)))} "\\n"', free]
        body = " ".join(names) or '""'
        return [f"{rule}: {body}", *rules]

    def _free_text(self, rule: str, end: str) -> tuple[str, str]:
        """Return the rule of any text up to `end`, and what of that the rule has not.

        An end with a special token is written with that token; up to there it is text.
        """
        at, token = special_in(end, self._special)
        if not token:  # the end is found in the text
            return f"{rule}[suffix={quoted(end)}]: /(?s:.*)/", ""
        begin = re.escape(end[:at]).replace("/", r"\/")
        return f"{rule}: /(?s:.*){begin}/", self._text(end[at:])

    def _text(self, text: str) -> str:
        parts = (spelled(part, self._special) for part in text.split(INDEX))
        return " /[0-9]{1,3}/ ".join(parts)

    @staticmethod
    def _joined(*parts: str) -> str:
        return " ".join(part for part in parts if part)


def call_schema(tool: Tool) -> Schema:
    """Return the schema of a call in Llama's JSON, definitions at its root."""
    arguments = {"type": "object"} | (tool.function.parameters or NO_ARGUMENTS)
    shared = {name: arguments.pop(name) for name in DEFINITIONS if name in arguments}
    return shared | {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def spacing_of(space: str) -> Schema:
    """Return llguidance's options for JSON with `space`, a regex, between its parts."""
    return {"whitespace_flexible": bool(space), "whitespace_pattern": space or None}


def python_value(rule: str, schema: Schema) -> list[str]:
    """Return the rules of a value in Python's form, with JSON's constants."""
    return [f"{rule}: {json_value(schema)}"]
