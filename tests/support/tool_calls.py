"""Tools, and calls of them as each format has them."""

from typing import Any

import msgspec

from headrace.model.output_formats import ToolFormat
from headrace.tokenizer_proc.requests.tools import Tool

FORECAST = {
    "name": "forecast",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "hours": {"$ref": "#/$defs/hours"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"hours": {"type": "array", "items": {"type": "boolean"}}},
    },
}
NOW = {"name": "now"}

CALLS = {
    ToolFormat.HERMES: (
        '<tool_call>\n{"name": "forecast", "arguments": {"city": "Ås", "hours": [true]}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    ToolFormat.QWEN3_CODER: (
        "<tool_call>\n<function=forecast>\n<parameter=city>\nÅs <b>\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n<parameter=hours>\n[true]\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    ToolFormat.SEED_OSS: (
        "<seed:tool_call>\n<function=forecast>\n<parameter=city>Ås <b></parameter>\n"
        "<parameter=unit>C</parameter>\n<parameter=hours>[true]</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
    ),
    ToolFormat.LLAMA3_JSON: (
        '{"name": "forecast", "parameters": {"city": "Ås", "days": 3}}; '
        '{"name": "now", "parameters": {}}'
    ),
    ToolFormat.MISTRAL: (
        '[TOOL_CALLS][{"name": "forecast", "arguments": {"city": "Ås"}}, '
        '{"name": "now", "arguments": {}}]'
    ),
    ToolFormat.PYTHONIC: '[forecast(city="Ås", unit="F", hours=[true]), now()]',
    ToolFormat.DEEPSEEK_V3: (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n```json\n"
        '{"city": "Ås"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    ToolFormat.DEEPSEEK_V31: (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{"city": "Ås"}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    ToolFormat.GLM45: (
        "<tool_call>forecast\n<arg_key>city</arg_key>\n<arg_value>Ås <b></arg_value>\n"
        "<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n<arg_key>hours</arg_key>\n"
        "<arg_value>[true]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
    ),
    ToolFormat.LFM2: (
        '<|tool_call_start|>[forecast(city="Ås", unit="F", hours=[true]), now()]<|tool_call_end|>'
    ),
    ToolFormat.MINIMAX_M2: (
        '<minimax:tool_call>\n<invoke name="forecast">\n<parameter name="city">Ås <b></parameter>\n'
        '<parameter name="unit">C</parameter>\n<parameter name="hours">[true]</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ),
    ToolFormat.DEEPSEEK_V32: (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="forecast">\n'
        '<｜DSML｜parameter name="city" string="true">Ås </b></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="unit" string="true">C</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="hours" string="false">[true]</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
    ToolFormat.KIMI_K2: (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.forecast:0"
        '<|tool_call_argument_begin|>{"city": "Ås"}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    ToolFormat.GEMMA4: (
        '<|tool_call>call:forecast{city:<|"|>Ås <b><|"|>,unit:<|"|>C<|"|>,hours:[true]}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>"
    ),
    ToolFormat.HARMONY: (
        "<|channel|>commentary to=functions.forecast <|constrain|>json<|message|>"
        '{"city": "Ås"}<|call|><|start|>assistant'
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    ),
}


def tools(*functions: dict[str, Any]) -> list[Tool]:
    return msgspec.convert([{"type": "function", "function": f} for f in functions], list[Tool])
