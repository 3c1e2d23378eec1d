"""Anthropic's `/v1/messages` as a struct, and the chat it comes to.

What a chat means is known in `openai_requests.py`; here is only how Anthropic writes it.
https://docs.anthropic.com/en/api/messages
"""

from typing import Any, Literal

import msgspec

from headrace.errors import InvalidValue, Unsupported
from headrace.tokenizer_proc.field_names import refuse
from headrace.tokenizer_proc.openai_requests import (
    Body,
    ChatMessage,
    ChatRequest,
    TextPart,
    check_chat,
    text_of,
)
from headrace.tokenizer_proc.sampling_fields import StreamOptions, check_ranges

Object = dict[str, Any]

# A chat's fields, as they are called here.
CHAT_NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "continue_final_message": "messages",
    "response_format": "output_config",
}


class InputMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextPart]


class Metadata(msgspec.Struct):
    """`metadata`."""

    user_id: str | None = None


class Thinking(msgspec.Struct):
    """`thinking`: whether the model may think before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[TextPart] | None = None
    tools: list[Object] | None = None
    tool_choice: Object | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of `/v1/messages`. `top_k` is 0 where it is off."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    output_config: Object | None = None
    mcp_servers: list[Object] | None = None
    container: str | Object | None = None


MESSAGES = Body(MessagesRequest)
COUNT = Body(CountRequest)


def decode_messages(body: bytes | memoryview) -> MessagesRequest:
    """Decode and check the body of `/v1/messages`."""
    request: MessagesRequest = MESSAGES.decode(body)
    check_ranges(request)
    refuse(request, ("mcp_servers", "container"))
    return request


def decode_count(body: bytes | memoryview) -> CountRequest:
    """Decode the body of `/v1/messages/count_tokens`."""
    request: CountRequest = COUNT.decode(body)
    return request


def chat_of_messages(request: CountRequest) -> ChatRequest:
    """Return the chat that a request comes to.

    An answer that the client has begun, the assistant's last message, goes on.

    Raises:
        RequestError: it asks for what there is not. The text names a chat's field.
    """
    if request.tools:
        raise Unsupported("tools: not supported by this server yet", "tools")
    messages = []
    if request.system is not None:
        messages.append(ChatMessage("system", text_of(request.system, "system")))
    for index, message in enumerate(request.messages):
        add(messages, message, f"messages[{index}].content")
    if not request.messages:
        raise InvalidValue("messages: must have at least one message", "messages")
    chat = ChatRequest(
        messages=messages,
        model=request.model,
        continue_final_message=request.messages[-1].role == "assistant",
    )
    if isinstance(request, MessagesRequest):
        chat.stream = request.stream
        chat.stream_options = StreamOptions(True, True) if request.stream else None
        chat.max_completion_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        chat.user = request.metadata.user_id if request.metadata else None
    check_chat(chat)
    return chat


def add(messages: list[ChatMessage], message: InputMessage, where: str) -> None:
    """Add a message; what follows one of the same role is a part of that, as with Anthropic."""
    text = text_of(message.content, where)
    last = messages[-1] if messages else None
    if last is not None and last.role == message.role:
        last.content = f"{last.content}\n{text}"
    else:
        messages.append(ChatMessage(message.role, text))
