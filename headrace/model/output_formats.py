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
    DEEPSEEK_V32 = "deepseek_v32"
    GLM45 = "glm45"
    LFM2 = "lfm2"
    KIMI_K2 = "kimi_k2"
    MINIMAX_M2 = "minimax_m2"
    GEMMA4 = "gemma4"
    SEED_OSS = "seed_oss"
    HARMONY = "openai"


class ThoughtFormat(enum.StrEnum):
    """Formats of thoughts (reasoning)."""

    DEEPSEEK_R1 = "deepseek_r1"  # an answer begins with them, marked or not
    QWEN3 = "qwen3"  # where they are marked, in the answer or at the end of the prompt
    MISTRAL = "mistral"
    KIMI_K2 = "kimi_k2"  # as qwen3; the first call ends them, too
    GEMMA4 = "gemma4"
    SEED_OSS = "seed_oss"
    HARMONY = "openai_gptoss"  # messages of the channel `analysis`, anywhere in an answer


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
    "deepseekv32": ToolFormat.DEEPSEEK_V32,
    "glm": ToolFormat.GLM45,
    "glm47": ToolFormat.GLM45,
    "mimo": ToolFormat.QWEN3_CODER,
    "step3p5": ToolFormat.QWEN3_CODER,
    "minimax-m2": ToolFormat.MINIMAX_M2,
    "gpt-oss": ToolFormat.HARMONY,
}
THOUGHT_ALIASES = {
    "deepseek-r1": ThoughtFormat.DEEPSEEK_R1,
    "qwen3-thinking": ThoughtFormat.DEEPSEEK_R1,
    "deepseek_v3": ThoughtFormat.QWEN3,
    "deepseek-v3": ThoughtFormat.QWEN3,
    "glm45": ThoughtFormat.QWEN3,
    "glm47": ThoughtFormat.QWEN3,
    "holo2": ThoughtFormat.QWEN3,
    "mimo": ThoughtFormat.QWEN3,
    "minimax": ThoughtFormat.QWEN3,
    "minimax_m2": ThoughtFormat.QWEN3,
    "nemotron_3": ThoughtFormat.QWEN3,
    "nemotron_v3": ThoughtFormat.QWEN3,
    "step3p5": ThoughtFormat.QWEN3,
    "gpt-oss": ThoughtFormat.HARMONY,
}
TOOL_PARSERS = (AUTO, NONE, *ToolFormat, *TOOL_ALIASES)
REASONING_PARSERS = (AUTO, NONE, *ThoughtFormat, *THOUGHT_ALIASES)

# Marks of formats that are not read here, whose templates have marks of others, too. They are those
# of Hunyuan and MiroThinker, and functions with JSON in Llama 3.1's own prompts.
FOREIGN_MARKS = ("<tool_sep>", "<use_mcp_tool>", "}</function>")
# What the template of a model that writes so has in it, all of it; the first that fits decides.
TOOL_SIGNS = (
    (("<|channel|>", "<|message|>"), ToolFormat.HARMONY),
    (("<|tool_call>call:",), ToolFormat.GEMMA4),
    (("<|tool_calls_section_begin|>",), ToolFormat.KIMI_K2),
    (("<minimax:tool_call>",), ToolFormat.MINIMAX_M2),
    (("｜DSML｜",), ToolFormat.DEEPSEEK_V32),
    (("<arg_key>",), ToolFormat.GLM45),
    (("<|tool_list_start|>",), ToolFormat.LFM2),
    (("<seed:tool_call>",), ToolFormat.SEED_OSS),
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
THOUGHT_SIGNS = (
    (("<|channel|>analysis",), ThoughtFormat.HARMONY),
    (("<|channel>thought",), ThoughtFormat.GEMMA4),
    (("[THINK]",), ThoughtFormat.MISTRAL),
    (("<|tool_calls_section_begin|>", "</think>"), ThoughtFormat.KIMI_K2),
    (("<seed:think>",), ThoughtFormat.SEED_OSS),
    (("</think>",), ThoughtFormat.QWEN3),
)

# Between what thoughts are, but for harmony's.
THOUGHT_MARKS = {
    ThoughtFormat.DEEPSEEK_R1: ("<think>", "</think>"),
    ThoughtFormat.QWEN3: ("<think>", "</think>"),
    ThoughtFormat.MISTRAL: ("[THINK]", "[/THINK]"),
    ThoughtFormat.KIMI_K2: ("<think>", "</think>"),
    ThoughtFormat.GEMMA4: ("<|channel>thought", "<channel|>"),
    ThoughtFormat.SEED_OSS: ("<seed:think>", "</seed:think>"),
}
HARMONY_OPENING = "<|start|>assistant<|channel|>analysis<|message|>"  # of thoughts
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
# Tokens that a reader of thoughts has to see.
THOUGHT_TOKENS = THOUGHT_MARKS | {
    ThoughtFormat.GEMMA4: ("<|channel>", "<channel|>"),
    ThoughtFormat.HARMONY: HARMONY_MARKS,
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
    ToolFormat.DEEPSEEK_V32: ("｜DSML｜",),
    ToolFormat.KIMI_K2: (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    ToolFormat.SEED_OSS: ("<seed:tool_call>", "</seed:tool_call>"),
    ToolFormat.MINIMAX_M2: ("<minimax:tool_call>", "</minimax:tool_call>"),
    ToolFormat.GEMMA4: ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ToolFormat.HARMONY: HARMONY_MARKS,
}
# A call does not say which of its arguments are strings: its tool's schema does.
BY_SCHEMA = (
    ToolFormat.QWEN3_CODER,
    ToolFormat.GLM45,
    ToolFormat.SEED_OSS,
    ToolFormat.MINIMAX_M2,
    ToolFormat.DEEPSEEK_V32,
)


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
    if format is ThoughtFormat.HARMONY:
        return False  # a message says itself what it is
    begin, end = THOUGHT_MARKS[format]
    if begin in continued or end in continued:
        return continued.rfind(begin) > continued.rfind(end)
    return format is ThoughtFormat.DEEPSEEK_R1 or prompt.rstrip().endswith(begin)


def is_closed(format: ThoughtFormat, prompt: str, continued: str = "") -> bool:
    """Whether there are no thoughts after `prompt`, since it has their end."""
    if format is ThoughtFormat.HARMONY:
        return False
    begin, end = THOUGHT_MARKS[format]
    if end in continued:
        return continued.rfind(begin) < continued.rfind(end)
    return prompt.rstrip().endswith(end)
