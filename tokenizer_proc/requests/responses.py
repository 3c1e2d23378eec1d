"""OpenAI's `/v1/responses` as a struct, and the chat it comes to.

What a chat means is known in `openai.py`; here is only how this API writes it. Nothing is
stored. https://platform.openai.com/docs/api-reference/responses/create
"""

from typing import Any, Literal

import msgspec
from msgspec import UnsetType

from headrace.errors import InvalidValue, Unsupported
from headrace.model.sampling_defaults import SamplingDefaults
from headrace.model.sampling_parameters import SamplingParameters
from headrace.response_bodies.response_options import (
    InputFormat,
    OfferedFunction,
    Reasoning,
    TextFormat,
    TextOptions,
    WantedFunction,
)
from headrace.tokenizer_proc.requests.field_names import refuse
from headrace.tokenizer_proc.requests.mixed_content import (
    Content,
    image_names,
    image_part,
    plain,
    text_part,
    with_runs_joined,
)
from headrace.tokenizer_proc.requests.openai import (
    BodyDecoder,
    ChatRequest,
    TextPart,
    checked_chat,
    text_of,
)
from headrace.tokenizer_proc.requests.sampling import check_ranges, stated
from headrace.tokenizer_proc.requests.text_files import FileData, text_of_file

Object = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")  # thoughts are in clear text
IMAGE, FILE = "input_image", "input_file"
TOOL_TYPES = ("function", "custom")
MAX_ECHO_BYTES = 1 << 20  # of fields that a response repeats, in each event that has all of it
TEXT_PARTS = ("input_text", "output_text", "text")
THOUGHT_PARTS = ("reasoning_text", "summary_text")
UNSUPPORTED = (
    "previous_response_id",
    "conversation",
    "background",
    "prompt",
    "context_management",
    "moderation",
)
# Taken unread: they change no answer, or are about tools that OpenAI's servers run.
NOT_READ = (
    "access_programs",
    "background_options",
    "image",
    "max_tool_calls",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
    "stream_options",
)

# A chat's fields that are called otherwise here.
CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tools[].function.name": "tools[].name",
    "tools[].function.parameters.type": "tools[].parameters.type",
    "tools[].custom.name": "tools[].name",
    "tools[].custom.format": "tools[].format",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.custom.name": "tool_choice.name",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
    "tool_choice.allowed_tools.tools[].function.name": "tool_choice.tools[].name",
    "tool_choice.allowed_tools.tools[].custom.name": "tool_choice.tools[].name",
}


class InputPart(TextPart):
    """A part of an item's content."""

    image_url: str | None = None
    detail: str | None = None
    file_data: str | None = None
    filename: str | None = None


class InputItem(msgspec.Struct):
    """A message, unless `type` names another kind, which then determines the fields."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    input: str | None = None


class ResponsesRequest(SamplingParameters, kw_only=True):
    """The body of `/v1/responses`. The last group is vLLM's."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[OfferedFunction] | None = None
    tool_choice: Literal["auto", "none", "required"] | WantedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | Object | None = None
    background: bool | None = None
    prompt: Object | None = None
    context_management: Any = None
    moderation: Any = None

    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    priority: int | None = None
    cache_salt: str | None = None


# The fields of a chat that are the same here.
SHARED = (
    "model",
    "stream",
    "parallel_tool_calls",
    "top_logprobs",
    *SamplingParameters.__struct_fields__,
    "seed",
    "stop",
    "ignore_eos",
    "priority",
    "cache_salt",
)
RESPONSES = BodyDecoder(ResponsesRequest)


def decode_responses(body: bytes | memoryview) -> ResponsesRequest:
    """Decode and check the body of `/v1/responses`, except the fields shared with a chat."""
    request: ResponsesRequest = RESPONSES.decode(body)
    check_ranges(request)
    refuse(request, UNSUPPORTED)
    if request.truncation not in (None, "disabled", "auto"):
        raise InvalidValue(
            f"truncation: must be 'disabled' or 'auto', not '{request.truncation}'", "truncation"
        )
    for one in request.include or ():
        if one not in INCLUDABLE:
            raise Unsupported(f"include: '{one}' is not supported by this server", "include")
    return request


def chat_of_responses(request: ResponsesRequest) -> tuple[ChatRequest, dict[str, str]]:
    """Return the chat that a request comes to, and what its images are called in the request;
    raises as `checked_chat` does."""
    body = chat_body(request)
    return checked_chat(body), image_names(body["messages"])


def chat_body(request: ResponsesRequest) -> Object:
    """Return the body of the same chat."""
    body: Object = {name: getattr(request, name) for name in SHARED}
    body |= {
        "messages": messages_of(request),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": LOGPROBS in (request.include or ()) or bool(request.top_logprobs),
        "user": request.safety_identifier or request.user,
    }
    if request.tools:
        body["tools"] = [offered(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if isinstance(choice, WantedFunction):
        body["tool_choice"] = chosen(choice)
    elif choice is not None:
        body["tool_choice"] = choice
    if request.text is not None and request.text.format is not None:
        wanted = msgspec.to_builtins(request.text.format)
        body["response_format"] = {"type": wanted["type"], "json_schema": wanted}
    if request.reasoning is not None and request.reasoning.effort is not None:
        effort = request.reasoning.effort
        thinks = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        body["chat_template_kwargs"] = thinks
    return body


def offered(tool: OfferedFunction, where: str) -> Object:
    """Return a tool as a chat has it."""
    if tool.type not in TOOL_TYPES:
        raise Unsupported(f"{where}: '{tool.type}' is not offered by this server", where)
    if tool.name is None:
        raise InvalidValue(f"{where}.name: must be there", f"{where}.name")
    if tool.type == "custom":
        custom = {"name": tool.name, "description": tool.description}
        return {"type": "custom", "custom": custom | input_format(tool.format, where)}
    function = {"name": tool.name, "description": tool.description}
    more = {"parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": function | more}


def input_format(format: InputFormat | UnsetType, where: str) -> Object:
    """Return `format` of a custom tool as a chat has it."""
    if isinstance(format, UnsetType) or format.type == "text":
        return {}
    if format.definition is None or format.syntax is None:
        where = f"{where}.format"
        raise InvalidValue(f"{where}: a grammar needs 'definition' and 'syntax'", where)
    grammar = {"definition": format.definition, "syntax": format.syntax}
    return {"format": {"type": "grammar", "grammar": grammar}}


def chosen(choice: WantedFunction) -> Object:
    """Return `tool_choice` of one tool, or of some, as a chat has it."""
    if choice.type in TOOL_TYPES and choice.name is not None:
        return {"type": choice.type, choice.type: {"name": choice.name}}
    if choice.type != "allowed_tools" or choice.mode is None or choice.tools is None:
        raise InvalidValue(
            "tool_choice: must be 'auto', 'none', 'required', a tool by type and name, or "
            "'allowed_tools' with 'mode' and 'tools'",
            "tool_choice",
        )
    for index, tool in enumerate(choice.tools):
        if tool.type not in TOOL_TYPES:
            where = f"tool_choice.tools[{index}]"
            raise Unsupported(f"{where}: '{tool.type}' is not offered by this server", where)
    tools = [{"type": tool.type, tool.type: {"name": tool.name}} for tool in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def messages_of(request: ResponsesRequest) -> list[Object]:
    """Return the conversation, which the instructions begin."""
    messages: list[Object] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise InvalidValue("input: must not be empty", "input")
    for index, item in enumerate(request.input):
        add(messages, as_chat(item, f"input[{index}]"))
    messages = with_runs_joined(messages, system_role)
    for message in messages:
        if "content" not in message and "tool_calls" not in message:
            message["content"] = ""  # thoughts that nothing has followed
    return messages


def as_chat(item: InputItem, where: str) -> Object:
    """Return an item as a chat's message."""
    match item.type:
        case "message":
            if item.role is None or item.content is None:
                raise InvalidValue(f"{where}: a message needs 'role' and 'content'", where)
            role = "system" if item.role == "developer" else item.role
            return {"role": role, "content": content_of(item.content, where, "content")}
        case "function_call":
            if item.name is None or item.arguments is None:
                raise InvalidValue(f"{where}: a call needs 'name' and 'arguments'", where)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "custom_tool_call":
            if item.name is None or item.input is None:
                raise InvalidValue(f"{where}: a call needs 'name' and 'input'", where)
            custom: Object = {"id": item.call_id, "type": "custom"}
            custom["custom"] = {"name": item.name, "input": item.input}
            return {"role": "assistant", "tool_calls": [custom]}
        case "function_call_output" | "custom_tool_call_output":
            output = content_of(item.output or "", where, "output")
            return {"role": "tool", "tool_call_id": item.call_id, "content": output}
        case "reasoning":
            thoughts = text_of(item.content or item.summary or "", where, THOUGHT_PARTS)
            return {"role": "assistant", "reasoning_content": thoughts}
        case _:
            raise Unsupported(f"{where}: '{item.type}' items are not supported", where)


def content_of(content: str | list[InputPart], where: str, field: str) -> Content:
    """Return the content of an item as a chat's."""
    if isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        if part.type == IMAGE:
            place = f"{where}.{field}[{index}].image_url"
            if part.image_url is None:
                raise InvalidValue(f"{place}: must be there; no files are kept here", place)
            parts.append(image_part(part.image_url, part.detail or "auto", place))
        elif part.type == FILE:
            file = FileData(part.file_data, part.filename)
            parts.append(text_part(text_of_file(file, f"{where}.{field}[{index}]")))
        else:
            parts.append(text_part(text_of([part], where, TEXT_PARTS)))
    return plain(parts)


def add(messages: list[Object], message: Object) -> None:
    """Add a message. Consecutive reasoning, text and calls of the assistant become one chat
    message."""
    last: Object = messages[-1] if messages else {"role": None}
    if message["role"] == last["role"] == "assistant" and not (
        "content" in last and "content" in message
    ):
        calls = last.get("tool_calls", [])
        calls += message.pop("tool_calls", [])
        last |= message | ({"tool_calls": calls} if calls else {})
    else:
        messages.append(message)


def system_role(message: Object) -> str:
    """Return the role of a system message: those in a row are one, as templates require."""
    return "system" if message["role"] == "system" else ""


def echo_of(request: ResponsesRequest, defaults: SamplingDefaults) -> bytes:
    """Return the fields that a response repeats, JSON, with their defaults."""
    text, reasoning = request.text or TextOptions(), request.reasoning or Reasoning()
    return echoed(
        {
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": reasoning,
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": stated(request.temperature, defaults.temperature),
            "text": {"format": text.format or TextFormat("text")},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": stated(request.top_p, defaults.top_p),
            "truncation": request.truncation or "disabled",
            "user": request.user,
        }
    )


def echoed(fields: Object) -> bytes:
    """Return fields as JSON. Each event with a response has all; the context bounds instructions.

    Raises:
        InvalidValue: the others are too long.
    """
    parts = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    sizes = {name: len(bytes(part)) for name, part in parts.items() if name != "instructions"}
    total = sum(sizes.values())
    if total > MAX_ECHO_BYTES:
        longest = max(sizes, key=lambda name: sizes[name])
        raise InvalidValue(
            f"{longest}: the fields that responses repeat have {total} bytes as JSON, more than "
            f"{MAX_ECHO_BYTES}; make this one shorter",
            longest,
        )
    return msgspec.json.encode(parts)
