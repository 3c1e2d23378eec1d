"""A model's formats are told from its chat template, or by the names that others have for them."""

import pytest

from headrace.model.output_formats import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ThoughtFormat,
    ToolFormat,
    begins_inside,
    is_closed,
    thought_format,
    tool_format,
)

# What the templates of these models have in them.
TEMPLATES = {
    "Qwen2.5": ("within <tool_call></tool_call> XML tags", ToolFormat.HERMES),
    "Qwen3-Coder": ("<tool_call>\n<function=f>\n<parameter=a>", ToolFormat.QWEN3_CODER),
    "Step 3.7": (
        "'<tool_call>\n<function=' + call.name + '>\n' + '<parameter=' + name + '>\n'",
        ToolFormat.QWEN3_CODER,
    ),
    "GLM 4.6": ("<tool_call>{name}\n<arg_key>{key}</arg_key>", ToolFormat.GLM45),
    "Qwen3.5": (
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>",
        ToolFormat.QWEN3_CODER,
    ),
    "gpt-oss": ("<|start|>assistant<|channel|>final<|message|>", ToolFormat.HARMONY),
    "Gemma 4": ("'<|tool_call>call:' + function['name'] + '{'", ToolFormat.GEMMA4),
    "Kimi K2": ("<|tool_calls_section_begin|>", ToolFormat.KIMI_K2),
    "MiniMax M2": ("{%- set begin = '<minimax:tool_call>' -%}", ToolFormat.MINIMAX_M2),
    "DeepSeek V3.2": ("<｜DSML｜function_calls>", ToolFormat.DEEPSEEK_V32),
    "LFM2": ("List of tools: <|tool_list_start|>[", ToolFormat.LFM2),
    "Seed-OSS": (
        "<seed:tool_call>\n<function=f>\n<parameter=a>x</parameter>",
        ToolFormat.SEED_OSS,
    ),
    "Hunyuan": ("<tool_call>f<tool_sep>{}</tool_call>", None),
    "MiroThinker": ("<use_mcp_tool>, not <tool_call>", None),
    "Llama 3.1, its own prompt": ('<function=f>{"a": 1}</function> <|python_tag|>', None),
    "OLMo 3": ("<function_calls>\nget_weather(city='New York')\n</function_calls>", None),
    "MiniMax M1": ("<tool_calls>\n{}\n</tool_calls>", None),
    "ToolACE": ("[func_name1(params_name1=params_value1...)]", ToolFormat.PYTHONIC),
    "Llama 3.1": ("{{- '<|python_tag|>' + tool_call.name }}", ToolFormat.LLAMA3_JSON),
    "Llama 3.2": (
        '{"name": function name, "parameters": dictionary of argument name and its value}',
        ToolFormat.LLAMA3_JSON,
    ),
    "Llama 4": ("<|python_start|><|python_end|>", ToolFormat.PYTHONIC),
    "Mistral": ("{{- '[TOOL_CALLS] [' }}", ToolFormat.MISTRAL),
    "DeepSeek V3": (
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.type + '```json'",
        ToolFormat.DEEPSEEK_V3,
    ),
    "DeepSeek V3.1": ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'", ToolFormat.DEEPSEEK_V31),
    "SmolLM2, without tools": ("<|im_start|>", ToolFormat.HERMES),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_format_of_calls_is_derived_from_the_template(model: str) -> None:
    template, format = TEMPLATES[model]
    assert tool_format("auto", template) is format
    assert tool_format("none", template) is None
    assert tool_format("auto", None) is None


def test_the_format_of_thoughts_is_derived_from_the_template() -> None:
    assert thought_format("auto", "content.split('</think>')") is ThoughtFormat.QWEN3
    assert thought_format("auto", "[THINK]") is ThoughtFormat.MISTRAL
    kimi = "<|tool_calls_section_begin|><think></think>"
    assert thought_format("auto", kimi) is ThoughtFormat.KIMI_K2
    assert thought_format("auto", "'<|channel>thought\n<channel|>'") is ThoughtFormat.GEMMA4
    assert thought_format("auto", "<|channel|>analysis<|message|>") is ThoughtFormat.HARMONY
    assert thought_format("auto", "'<seed:think>' </think>") is ThoughtFormat.SEED_OSS
    assert thought_format("auto", "Hi") is None
    assert thought_format("none", "</think>") is None


def test_every_name_is_a_format() -> None:
    for name in TOOL_PARSERS[2:]:
        assert tool_format(name, None) in ToolFormat
    for name in REASONING_PARSERS[2:]:
        assert thought_format(name, None) in ThoughtFormat
    assert tool_format("qwen25", None) is ToolFormat.HERMES
    assert thought_format("deepseek-r1", None) is ThoughtFormat.DEEPSEEK_R1


@pytest.mark.parametrize(
    ("prompt", "qwen3", "deepseek_r1"),
    [
        ("assistant\n", False, True),
        ("assistant\n<think>\n", True, True),
        ("What is <think>?\nassistant\n", False, True),
    ],
)
def test_a_prompt_may_begin_the_thought(prompt: str, qwen3: bool, deepseek_r1: bool) -> None:
    assert begins_inside(ThoughtFormat.QWEN3, prompt) is qwen3
    assert begins_inside(ThoughtFormat.DEEPSEEK_R1, prompt) is deepseek_r1
    assert not is_closed(ThoughtFormat.QWEN3, prompt)


def test_a_prompt_may_end_the_thoughts() -> None:
    assert is_closed(ThoughtFormat.QWEN3, "assistant\n<think>\n\n</think>\n\n")
    assert is_closed(ThoughtFormat.DEEPSEEK_R1, "assistant\n<think>\n\n</think>\n\n")


def test_a_message_that_goes_on_may_be_within_a_thought() -> None:
    for format in (ThoughtFormat.QWEN3, ThoughtFormat.DEEPSEEK_R1):
        assert begins_inside(format, "a:<think>Well", "<think>Well")
        assert not is_closed(format, "a:<think>Well", "<think>Well")
        assert is_closed(format, "a:<think></think>Well", "<think></think>Well")


def test_harmony_is_never_inside_a_thought_or_past_it() -> None:
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    assert not begins_inside(ThoughtFormat.HARMONY, prompt)
    assert not is_closed(ThoughtFormat.HARMONY, prompt)


def test_gemma_4_closes_the_thoughts_that_are_switched_off() -> None:
    prompt = "<|turn>model\n<|channel>thought\n<channel|>"
    assert is_closed(ThoughtFormat.GEMMA4, prompt)
    assert not is_closed(ThoughtFormat.GEMMA4, "<|turn>model\n")
