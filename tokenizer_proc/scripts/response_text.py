"""Scripted answers as a model would write them: thoughts, text and calls, in its own format.

The detokenizer's parsers read them back, so a client gets what it would get from that model.
"""

import json
import random
from collections.abc import Sequence
from hashlib import blake2b
from http import HTTPStatus
from typing import Literal, assert_never

from headrace.errors import InvalidValue, ScriptedError
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import THOUGHT_MARKS, ThoughtFormat, ToolFormat
from headrace.testing.script import MockError, MockReply, MockToolCall, Words

PLAIN_WORDS = (
    "the of and to in is you that it was for on are as with they at be this have from or one had "
    "by word but not what all were we when your can said there use an each which do how their "
    "if will up other about out many then them these so some would make like time"
)
ERRORS = {  # by status: OpenAI's type and code
    400: ("invalid_request_error", "invalid_value"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("overloaded_error", "overloaded"),
}
MARK_HEADER = ("x-headrace-script", "error")  # distinguishes a scripted error from the server's own


def words_of(words: Words, seed: int | None, prompt: bytes, index: int) -> str:
    """Return a text of at least as many tokens as `words` has."""
    asked = (words.seed if words.seed is not None else seed, index)
    digest = blake2b(prompt + repr(asked).encode(), digest_size=8).digest()
    chosen = random.Random(int.from_bytes(digest, "little"))
    vocabulary = PLAIN_WORDS.split()
    return " ".join(chosen.choice(vocabulary) for _ in range(words.num_tokens))


def error_of(error: MockError) -> ScriptedError:
    """Return the error that a client gets."""
    kind, code = ERRORS.get(error.status, ("server_error", "internal_error"))
    if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and error.status not in ERRORS:
        kind, code = ERRORS[400]
    message = error.message or f"the script answers {error.status}"
    found = ScriptedError(error.status, message, error.error_type or kind, error.code or code)
    found.headers.append(MARK_HEADER)
    if error.retry_after is not None:
        found.headers.append(("retry-after", f"{error.retry_after:g}"))
    return found


def response_text(reply: MockReply, parsing: Parsing | None) -> str:
    """Return a reply as the model writes it.

    Raises:
        InvalidValue: the request, or the model, has no place for a call or a thought.
    """
    text = reply.text
    if reply.calls:
        if parsing is None or parsing.tools is None:
            names = ", ".join(call.name for call in reply.calls)
            raise InvalidValue(
                f"the script calls {names}, and the request offers no tools; send tools", "tools"
            )
        text = with_calls(text, reply.calls, parsing.tools, parsing)
    if parsing is None or parsing.thoughts is None:
        if reply.thought:
            raise InvalidValue(
                "the script has a thought, and this model's answer has none here; start the server "
                "with --reasoning-parser qwen3, or leave the thought out"
            )
        return text
    if parsing.thoughts is ThoughtFormat.HARMONY:
        thought = f"<|channel|>analysis<|message|>{reply.thought}<|end|><|start|>assistant"
        opening = "" if reply.calls else "<|channel|>final<|message|>"
        return (thought if reply.thought else "") + opening + text
    begin, end = THOUGHT_MARKS[parsing.thoughts]
    if parsing.begins_inside:
        return f"{reply.thought}{end}\n\n{text}"
    return f"{begin}{reply.thought}{end}\n\n{text}" if reply.thought else text


def with_calls(
    text: str, calls: Sequence[MockToolCall], format: ToolFormat, parsing: Parsing
) -> str:
    """Return a text with calls behind it; Python's list of calls goes before it."""
    listed = [in_json(call, "arguments") for call in calls]
    match format:
        case ToolFormat.HERMES:
            return text + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in listed)
        case ToolFormat.QWEN3_CODER:
            return text + "\n".join(in_elements(call, parsing) for call in calls)
        case ToolFormat.SEED_OSS:
            return text + "\n".join(in_seed(call, parsing) for call in calls)
        case ToolFormat.LLAMA3_JSON:
            tag = "<|python_tag|>" if text else ""
            return text + tag + "; ".join(in_json(call, "parameters") for call in calls)
        case ToolFormat.MISTRAL:
            return f"{text}[TOOL_CALLS][{', '.join(listed)}]"
        case ToolFormat.PYTHONIC:
            return f"[{', '.join(map(in_python, calls))}]{text}"
        case ToolFormat.LFM2:
            listed = [in_python(call) for call in calls]
            return f"<|tool_call_start|>[{', '.join(listed)}]<|tool_call_end|>{text}"
        case ToolFormat.GLM45:
            return text + "\n".join(in_arguments(call, parsing) for call in calls)
        case ToolFormat.HARMONY:
            said = [f"<|channel|>commentary<|message|>{text}<|end|>"] if text else []
            return "<|start|>assistant".join([*said, *map(in_harmony, calls)])
        case _:
            return text + in_section(calls, format, parsing)


def in_section(
    calls: Sequence[MockToolCall],
    format: Literal[
        ToolFormat.DEEPSEEK_V3,
        ToolFormat.DEEPSEEK_V31,
        ToolFormat.DEEPSEEK_V32,
        ToolFormat.KIMI_K2,
        ToolFormat.MINIMAX_M2,
        ToolFormat.GEMMA4,
    ],
    parsing: Parsing,
) -> str:
    """Return calls between marks around all of them, or around each."""
    match format:
        case ToolFormat.MINIMAX_M2 | ToolFormat.DEEPSEEK_V32:
            return in_invocations(calls, format, parsing)
        case ToolFormat.KIMI_K2:
            inner = "".join(in_kimi(call, index) for index, call in enumerate(calls))
            return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
        case ToolFormat.GEMMA4:
            listed = (f"{call.name}{in_gemma(call.arguments)}" for call in calls)
            return "".join(f"<|tool_call>call:{call}<tool_call|>" for call in listed)
        case ToolFormat.DEEPSEEK_V3 | ToolFormat.DEEPSEEK_V31:
            inner = "\n".join(in_deepseek(call, format) for call in calls)
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case _:
            assert_never(format)


def as_json(value: object) -> str:
    """Return a value as models write JSON."""
    return json.dumps(value, ensure_ascii=False)


def in_json(call: MockToolCall, arguments: str) -> str:
    """Return a call as an object, whose arguments have a name of their own."""
    return as_json({"name": call.name, arguments: call.arguments})


def in_python(call: MockToolCall) -> str:
    """Return a call as Python has it, with JSON's names of constants."""
    arguments = (f"{name}={as_json(value)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def in_elements(call: MockToolCall, parsing: Parsing) -> str:
    """Return a call as Qwen3-Coder has it: what the tool calls a string stands as it is."""
    strings = parsing.string_parameters.get(call.name, [])
    lines = ["<tool_call>", f"<function={call.name}>"]
    for name, value in call.arguments.items():
        is_bare = name in strings and isinstance(value, str)
        lines += [f"<parameter={name}>", str(value) if is_bare else as_json(value), "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


def in_seed(call: MockToolCall, parsing: Parsing) -> str:
    """Return a call as Seed-OSS has it: as Qwen3-Coder, with values beside their tags."""
    strings = parsing.string_parameters.get(call.name, [])
    lines = ["<seed:tool_call>", f"<function={call.name}>"]
    for name, value in call.arguments.items():
        is_bare = name in strings and isinstance(value, str)
        lines.append(f"<parameter={name}>{value if is_bare else as_json(value)}</parameter>")
    return "\n".join([*lines, "</function>", "</seed:tool_call>"])


def in_arguments(call: MockToolCall, parsing: Parsing) -> str:
    """Return a call as GLM has it: what the tool calls a string stands as it is."""
    strings = parsing.string_parameters.get(call.name, [])
    lines = [f"<tool_call>{call.name}"]
    for name, value in call.arguments.items():
        is_bare = name in strings and isinstance(value, str)
        lines.append(f"<arg_key>{name}</arg_key>")
        lines.append(f"<arg_value>{value if is_bare else as_json(value)}</arg_value>")
    return "\n".join([*lines, "</tool_call>"])


def in_deepseek(call: MockToolCall, format: ToolFormat) -> str:
    """Return a call as DeepSeek's models have it."""
    arguments = as_json(call.arguments)
    if format is ToolFormat.DEEPSEEK_V31:
        said = f"{call.name}<｜tool▁sep｜>{arguments}"
    else:
        said = f"function<｜tool▁sep｜>{call.name}\n```json\n{arguments}\n```"
    return f"<｜tool▁call▁begin｜>{said}<｜tool▁call▁end｜>"


def in_invocations(calls: Sequence[MockToolCall], format: ToolFormat, parsing: Parsing) -> str:
    """Return calls as MiniMax M2 and DeepSeek V3.2 have them; only the latter says what a string
    is."""
    is_deepseek = format is ToolFormat.DEEPSEEK_V32
    mark, section = ("｜DSML｜", "function_calls") if is_deepseek else ("", "minimax:tool_call")
    lines = [f"<{mark}{section}>"]
    for call in calls:
        strings = parsing.string_parameters.get(call.name, [])
        lines.append(f'<{mark}invoke name="{call.name}">')
        for name, value in call.arguments.items():
            is_bare = isinstance(value, str) and (is_deepseek or name in strings)
            kind = f' string="{as_json(is_bare)}"' if is_deepseek else ""
            said = value if is_bare else as_json(value)
            lines.append(f'<{mark}parameter name="{name}"{kind}>{said}</{mark}parameter>')
        lines.append(f"</{mark}invoke>")
    return "\n".join([*lines, f"</{mark}{section}>"])


def in_kimi(call: MockToolCall, index: int) -> str:
    """Return a call as Kimi K2 has it."""
    id, arguments = f"functions.{call.name}:{index}", as_json(call.arguments)
    return f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def in_gemma(value: object) -> str:
    """Return a value as Gemma 4 has it."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{name}:{in_gemma(one)}" for name, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(in_gemma, value)) + "]"
        case _:
            return as_json(value)


def in_harmony(call: MockToolCall) -> str:
    """Return a call as gpt-oss has it."""
    header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
    return f"{header}{as_json(call.arguments)}<|call|>"
