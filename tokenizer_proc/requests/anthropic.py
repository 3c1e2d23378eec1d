"""Anthropic's `/v1/messages` as a struct, and the chat it comes to.

What a chat means is known in `openai.py`; here is only how Anthropic writes it.
https://docs.anthropic.com/en/api/messages
"""

from typing import Any, Literal

import msgspec

from headrace.errors import InvalidValue, Unsupported
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
from headrace.tokenizer_proc.requests.sampling import check_ranges
from headrace.tokenizer_proc.requests.text_files import check_type, text_of_base64

Object = dict[str, Any]

# A chat's fields that are called otherwise here.
CHAT_NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "tools[].function.name": "tools[].name",
    "tools[].function.parameters.type": "tools[].input_schema.type",
    "tool_choice.function.name": "tool_choice.name",
}
# Taken unread: they change no answer.
NOT_READ = (
    "cache_control",
    "diagnostics",
    "inference_geo",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Source(msgspec.Struct):
    """`source` of an image, or of a document."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[TextPart] | None = None

    @property
    def image_url(self) -> str | None:
        """The same as a URL."""
        if self.type == "base64" and self.media_type is not None and self.data is not None:
            return f"data:{self.media_type};base64,{self.data}"
        return self.url if self.type == "url" else None


class Citations(msgspec.Struct):
    """`citations` of a document."""

    enabled: bool = False


class Shown(TextPart):
    """Text, an image, or a document of text; the last group is a document's."""

    source: Source | None = None

    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class Block(Shown):
    """A part of a message's content; which fields there are depends on its type."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: str | list[Shown] | None = None


class InputMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class OfferedTool(msgspec.Struct):
    """An entry of `tools`."""

    name: str
    input_schema: Object | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class WantedTool(msgspec.Struct):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Metadata(msgspec.Struct):
    """`metadata`."""

    user_id: str | None = None


class Thinking(msgspec.Struct):
    """`thinking`: whether the model may think before it answers. The budget is up to it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema: Object


class OutputConfig(msgspec.Struct):
    """`output_config`."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[TextPart] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: WantedTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    mcp_servers: list[Object] | None = None
    container: str | Object | None = None


MESSAGES = BodyDecoder(MessagesRequest)
COUNT = BodyDecoder(CountRequest)


def decode_messages(body: bytes | memoryview) -> MessagesRequest:
    """Decode and check the body of `/v1/messages`, except the fields shared with a chat."""
    request: MessagesRequest = MESSAGES.decode(body)
    check_ranges(request)
    refuse(request, ("mcp_servers", "container"))
    return request


def decode_count(body: bytes | memoryview) -> CountRequest:
    """Decode the body of `/v1/messages/count_tokens`."""
    request: CountRequest = COUNT.decode(body)
    return request


def chat_of_messages(request: CountRequest) -> tuple[ChatRequest, dict[str, str]]:
    """Return the chat that a request comes to, and what its images are called in the request;
    raises as `checked_chat` does."""
    body = chat_body(request)
    return checked_chat(body), image_names(body["messages"])


def chat_body(request: CountRequest) -> Object:
    """Return the body of the same chat.

    An answer that the client has begun, the assistant's last message, goes on.
    """
    messages: list[Object] = []
    if request.system is not None:
        messages.append({"role": "system", "content": text_of(request.system, "system")})
    for index, message in enumerate(request.messages):
        messages += as_chat(message, f"messages[{index}].content")
    messages = with_runs_joined(messages, plain_role)
    body: Object = {"messages": messages, "model": request.model}
    if request.messages and request.messages[-1].role == "assistant":
        body["continue_final_message"] = True
    if request.tools:
        body["tools"] = [offered(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        body |= chosen(request.tool_choice)
    if request.thinking is not None:
        enabled = request.thinking.type != "disabled"
        body["chat_template_kwargs"] = {"enable_thinking": enabled}
        body["include_reasoning"] = request.thinking.display != "omitted"
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "output", "schema": request.output_config.format.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        body |= sampled(request)
    return body


def sampled(request: MessagesRequest) -> Object:
    """Return the sampling fields of a chat. Every event may have its usage."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    return {
        "stream": request.stream,
        "stream_options": usage if request.stream else None,
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": request.metadata.user_id if request.metadata else None,
    }


def offered(tool: OfferedTool, where: str) -> Object:
    """Return a tool as a chat has it."""
    if tool.type not in (None, "custom"):
        raise Unsupported(f"{where}: '{tool.type}' is not offered by this server", where)
    function = {"name": tool.name, "parameters": tool.input_schema}
    more = {"description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": function | more}


def chosen(choice: WantedTool) -> Object:
    """Return the tool-choice fields of a chat."""
    wanted: str | Object = TOOL_CHOICES.get(choice.type, "")
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidValue(
                "tool_choice.name: must be there, with type 'tool'", "tool_choice.name"
            )
        wanted = {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": wanted,
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def plain_role(message: Object) -> str:
    """Return the role of a message that is content alone: those in a row are one to Anthropic."""
    return str(message["role"]) if message.keys() == {"role", "content"} else ""


def as_chat(message: InputMessage, where: str) -> list[Object]:
    """Return a message as a chat's messages: each tool result becomes one of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts: list[Object] = []
    thoughts: list[str] = []
    calls: list[Object] = []
    results: list[Object] = []
    for index, block in enumerate(message.content):
        place = f"{where}[{index}]"
        if block.type == "thinking" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif block.type == "redacted_thinking":
            continue  # only Anthropic can read it
        elif block.type == "tool_use":
            calls.append(called(block, place))
        elif block.type == "tool_result":
            content = content_of(block.content or "", f"{place}.content")
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            results.append(result)
        else:
            parts.append(shown(block, where, index))
    found: Object = {"role": message.role, "content": plain(parts)}
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return results if results and not parts else [*results, found]


def content_of(content: str | list[Shown], where: str) -> Content:
    """Return what a tool has answered as a chat's content."""
    if isinstance(content, str):
        return content
    return plain([shown(part, where, index) for index, part in enumerate(content)])


def shown(part: Shown, where: str, index: int) -> Object:
    """Return a text or an image as a chat has it. A document is a text."""
    if part.type == "document":
        return text_part(document_text(part, f"{where}[{index}]"))
    if part.type != "image":
        return text_part(text_of([part], where))
    place = f"{where}[{index}].source"
    url = None if part.source is None else part.source.image_url
    if url is None:
        raise InvalidValue(
            f"{place}: must have 'type': 'base64' with 'media_type' and 'data', or 'type': 'url' "
            "with 'url'",
            place,
        )
    return image_part(url, "auto", place)


def document_text(part: Shown, where: str) -> str:
    """Return a document's text, below its title and its context."""
    place, source = f"{where}.source", part.source or Source("")
    if part.citations is not None and part.citations.enabled:
        raise Unsupported(f"{where}.citations: not supported by this server", f"{where}.citations")
    if source.type == "content" and source.content is not None:
        text = text_of(source.content, f"{place}.content")
    elif source.type in ("text", "base64") and source.data is not None:
        check_type(source.media_type or "", f"{place}.media_type")
        is_text = source.type == "text"
        text = source.data if is_text else text_of_base64(source.data, f"{place}.data")
    else:
        raise InvalidValue(
            f"{place}: must have 'type': 'text' or 'base64' with 'media_type' and 'data', or "
            "'type': 'content' with 'content'",
            place,
        )
    return "\n".join(filter(None, (part.title, part.context, text)))


def called(block: Block, where: str) -> Object:
    """Return a call of a tool as a chat has it."""
    if block.name is None or block.input is None:
        raise InvalidValue(f"{where}: a tool_use block needs 'name' and 'input'", where)
    function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}
