"""Formats of tool calls and reasoning, by vLLM's and SGLang's names, and their detection from a
chat template."""

import enum
from typing import TypeVar

AUTO, NONE = "auto", "none"


class ToolFormat(enum.StrEnum):
    """Formats of tool calls. `detokenizer_proc/parsers/` reads them."""

    HERMES = "hermes"
    QWEN3_CODER = "qwen3_coder"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    GLM45 = "glm45"
    LFM2 = "lfm2"


class ThoughtFormat(enum.StrEnum):
    """Formats of thoughts (reasoning)."""

    DEEPSEEK_R1 = "deepseek_r1"  # an answer begins with them, marked or not
    QWEN3 = "qwen3"  # where they are marked, in the answer or at the end of the prompt
    MISTRAL = "mistral"


Format = TypeVar("Format", ToolFormat, ThoughtFormat)

TOOL_ALIASES = {
    "qwen": ToolFormat.HERMES,
    "qwen25": ToolFormat.HERMES,
    "qwen3_xml": ToolFormat.QWEN3_CODER,
    "llama3": ToolFormat.LLAMA3_JSON,
    "llama4_json": ToolFormat.LLAMA3_JSON,
    "llama4_pythonic": ToolFormat.PYTHONIC,
    "deepseekv3": ToolFormat.DEEPSEEK_V3,
    "deepseekv31": ToolFormat.DEEPSEEK_V31,
    "glm": ToolFormat.GLM45,
    "glm47": ToolFormat.GLM45,
}
THOUGHT_ALIASES = {
    "deepseek-r1": ThoughtFormat.DEEPSEEK_R1,
    "qwen3-thinking": ThoughtFormat.DEEPSEEK_R1,
    "deepseek_v3": ThoughtFormat.QWEN3,
    "deepseek-v3": ThoughtFormat.QWEN3,
    "glm45": ThoughtFormat.QWEN3,
}
TOOL_PARSERS = (AUTO, NONE, *ToolFormat, *TOOL_ALIASES)
REASONING_PARSERS = (AUTO, NONE, *ThoughtFormat, *THOUGHT_ALIASES)

# Marks of formats that are not read here, whose templates have marks of others, too. They are those
# of Seed-OSS, Hunyuan and MiroThinker, and functions with JSON in Llama 3.1's own prompts.
FOREIGN_MARKS = ("<seed:tool_call>", "<tool_sep>", "<use_mcp_tool>", "}</function>")
# What the template of a model that writes so has in it, all of it; the first that fits decides.
TOOL_SIGNS = (
    (("<arg_key>",), ToolFormat.GLM45),
    (("<|tool_list_start|>",), ToolFormat.LFM2),
    (("<function=", "<parameter="), ToolFormat.QWEN3_CODER),
    (("<tool_call>",), ToolFormat.HERMES),
    (("[TOOL_CALLS]",), ToolFormat.MISTRAL),
    (("<｜tool▁calls▁begin｜>", "```json"), ToolFormat.DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), ToolFormat.DEEPSEEK_V31),
    (("<|python_start|>",), ToolFormat.PYTHONIC),
    (("func_name1(",), ToolFormat.PYTHONIC),
    (("<|python_tag|>",), ToolFormat.LLAMA3_JSON),
    (('"parameters": dictionary of argument name',), ToolFormat.LLAMA3_JSON),
)
TOOL_WORDS = ("tool", "function")  # in templates that have a place for tools, in whatever format
THOUGHT_SIGNS = ((("[THINK]",), ThoughtFormat.MISTRAL), (("</think>",), ThoughtFormat.QWEN3))

# Between what thoughts are.
THOUGHT_MARKS = {
    ThoughtFormat.DEEPSEEK_R1: ("<think>", "</think>"),
    ThoughtFormat.QWEN3: ("<think>", "</think>"),
    ThoughtFormat.MISTRAL: ("[THINK]", "[/THINK]"),
}
DEEPSEEK_MARKS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
TOOL_MARKS = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.QWEN3_CODER: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA3_JSON: ("<|python_tag|>",),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ToolFormat.PYTHONIC: ("<|python_start|>", "<|python_end|>"),
    ToolFormat.DEEPSEEK_V3: DEEPSEEK_MARKS,
    ToolFormat.DEEPSEEK_V31: DEEPSEEK_MARKS,
    ToolFormat.GLM45: (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    ToolFormat.LFM2: ("<|tool_call_start|>", "<|tool_call_end|>"),
}


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """Return the format that `--tool-call-parser` names, or by `auto` the template's."""
    if name == AUTO:
        if template is None or any(mark in template for mark in FOREIGN_MARKS):
            return None
        generic = ToolFormat.HERMES if knows_no_tools(template) else None
        return detected_by(template, TOOL_SIGNS) or generic
    return None if name == NONE else TOOL_ALIASES.get(name) or ToolFormat(name)


def knows_no_tools(template: str) -> bool:
    """Whether a template ignores tools; requests may then describe them in a message."""
    return not any(word in template.lower() for word in TOOL_WORDS)


def thought_format(name: str, template: str | None) -> ThoughtFormat | None:
    """Return the format that `--reasoning-parser` names, or by `auto` the template's."""
    if name == AUTO:
        return detected_by(template, THOUGHT_SIGNS)
    return None if name == NONE else THOUGHT_ALIASES.get(name) or ThoughtFormat(name)


def detected_by(
    template: str | None, formats: tuple[tuple[tuple[str, ...], Format], ...]
) -> Format | None:
    """Return the first format whose signs a template has."""
    for signs, format in formats:
        if template is not None and all(sign in template for sign in signs):
            return format
    return None


def begins_inside(format: ThoughtFormat, prompt: str, continued: str = "") -> bool:
    """Whether text after `prompt` begins in reasoning; `prompt` may end with the text that is
    `continued`."""
    begin, end = THOUGHT_MARKS[format]
    if begin in continued or end in continued:
        return continued.rfind(begin) > continued.rfind(end)
    return format is ThoughtFormat.DEEPSEEK_R1 or prompt.rstrip().endswith(begin)


def is_closed(format: ThoughtFormat, prompt: str, continued: str = "") -> bool:
    """Whether there are no thoughts after `prompt`, since it has their end."""
    begin, end = THOUGHT_MARKS[format]
    if end in continued:
        return continued.rfind(begin) < continued.rfind(end)
    return prompt.rstrip().endswith(end)
