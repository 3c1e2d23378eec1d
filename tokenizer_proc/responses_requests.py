"""OpenAI's `/v1/responses` as a struct, and the chat it comes to.

What a chat means is known in `openai_requests.py`; here is only how this API writes it. Nothing is
stored. https://platform.openai.com/docs/api-reference/responses/create
"""

from typing import Any, Literal

import msgspec

from headrace.errors import InvalidValue, Unsupported
from headrace.tokenizer_proc.field_names import refuse
from headrace.tokenizer_proc.openai_requests import (
    Body,
    ChatMessage,
    ChatRequest,
    ResponseFormat,
    TextPart,
    check_chat,
    text_of,
)
from headrace.tokenizer_proc.sampling_fields import check_ranges

Object = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")  # thoughts are told in clear text
TEXT_PARTS = ("input_text", "output_text", "text")
UNSUPPORTED = ("previous_response_id", "conversation", "background", "prompt")

# A chat's fields that are called otherwise here.
CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


class InputItem(msgspec.Struct):
    """A message, unless its type says otherwise."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[TextPart] | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """`text.format`."""

    type: str
    name: str | None = None
    schema: Object | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """`text`."""

    format: TextFormat | None = None


class Reasoning(msgspec.Struct):
    """`reasoning`. Thoughts are not summarized."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/responses`. The last group is vLLM's."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
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

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    priority: int | None = None
    cache_salt: str | None = None


# The fields of a chat that are called the same here.
SHARED = [
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatRequest.__struct_fields__
    and name not in ("tools", "tool_choice", "parallel_tool_calls")
]
RESPONSES = Body(ResponsesRequest)


def decode_responses(body: bytes | memoryview) -> ResponsesRequest:
    """Decode and check the body of `/v1/responses`, but for what it shares with a chat."""
    request: ResponsesRequest = RESPONSES.decode(body)
    check_ranges(request)
    refuse(request, UNSUPPORTED)
    if request.truncation not in (None, "disabled"):
        raise Unsupported(
            f"truncation: '{request.truncation}' is not supported by this server; 'disabled' is",
            "truncation",
        )
    for one in request.include or ():
        if one not in INCLUDABLE:
            raise Unsupported(f"include: '{one}' is not supported by this server", "include")
    return request


def chat_of_responses(request: ResponsesRequest) -> ChatRequest:
    """Return the chat that a request comes to.

    Raises:
        RequestError: it asks for what there is not. The text names a chat's field.
    """
    chat = ChatRequest(messages=messages_of(request))
    for name in SHARED:
        setattr(chat, name, getattr(request, name))
    if request.tools:
        raise Unsupported("tools: not supported by this server yet", "tools")
    chat.max_completion_tokens = request.max_output_tokens
    chat.logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    chat.user = request.safety_identifier or request.user
    if request.text is not None and request.text.format is not None:
        wanted = msgspec.to_builtins(request.text.format)
        chat.response_format = msgspec.convert(
            {"type": wanted["type"], "json_schema": wanted}, ResponseFormat
        )
    if request.reasoning is not None and request.reasoning.effort is not None:
        effort = request.reasoning.effort
        chat.chat_template_kwargs = {
            "reasoning_effort": effort,
            "enable_thinking": effort != "none",
        }
    check_chat(chat)
    return chat


def messages_of(request: ResponsesRequest) -> list[ChatMessage]:
    """Return the conversation, which the instructions begin."""
    messages: list[ChatMessage] = []
    if request.instructions:
        messages.append(ChatMessage("system", request.instructions))
    if isinstance(request.input, str):
        return [*messages, ChatMessage("user", request.input)]
    if not request.input:
        raise InvalidValue("input: must not be empty", "input")
    for index, item in enumerate(request.input):
        add(messages, item, f"input[{index}]")
    return messages


def add(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    """Add what an item says. There is one message of the system's at a time, as templates want."""
    if item.type != "message":
        raise Unsupported(f"{where}: '{item.type}' items are not supported by this server", where)
    if item.role is None or item.content is None:
        raise InvalidValue(f"{where}: a message needs 'role' and 'content'", where)
    role = "system" if item.role == "developer" else item.role
    text = text_of(item.content, f"{where}.content", TEXT_PARTS)
    if role == "system" and messages and messages[-1].role == role:
        messages[-1].content = f"{messages[-1].content}\n{text}"
    else:
        messages.append(ChatMessage(role, text))


def echo_of(request: ResponsesRequest) -> bytes:
    """Return the fields that a response repeats, JSON, with OpenAI's defaults."""
    text, reasoning = request.text or TextOptions(), request.reasoning or Reasoning()
    return msgspec.json.encode(
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
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": text.format or TextFormat("text")},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "user": request.user,
        }
    )
