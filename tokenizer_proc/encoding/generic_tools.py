"""Tools for chat templates that have no place for them, in the hermes format.

Tools are described in the system message, or in the first message of the user where the template
takes no system role. Earlier calls become text of the assistant, and their results a message of the
user, as the template can write them.
"""

import json
from typing import Any

from headrace.tokenizer_proc.encoding.message_content import add_text

Messages = list[dict[str, Any]]  # as templates are given them

SYSTEM_ROLES = ("system", "developer")
DESCRIPTION = """\
# Tools

You can call tools. Here are their names, what they do, and the JSON Schemas of their arguments:
{tools}

To call a tool, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "the tool's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
The result then comes between <tool_response> and </tool_response>. \
Call a tool where the answer needs it; otherwise answer without one."""


def describe_tools(messages: Messages, tools: list[dict[str, Any]], takes_system: bool) -> Messages:
    """Return a conversation that begins with a description of tools.

    Args:
        takes_system: whether the template has a place for a system message.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = DESCRIPTION.format(tools=listed)
    first = messages[0]
    if first["role"] in SYSTEM_ROLES:
        return [with_text(first, f"\n\n{text}"), *messages[1:]]
    if takes_system:
        return [{"role": "system", "content": text}, *messages]
    if first["role"] != "user":
        return [{"role": "user", "content": text}, *messages]
    return [joined({"role": "user", "content": text}, first), *messages[1:]]


def plain_messages(messages: Messages) -> Messages:
    """Return a conversation without calls and results: they are text of what role there is.

    Results in a row are one message, and so is what the user says after them: many templates want
    the roles to alternate.
    """
    found: Messages = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        plain = as_result(message) if is_result else as_text(message)
        if after_result and plain["role"] == "user":
            found[-1] = joined(found[-1], plain)
        else:
            found.append(plain)
        after_result = is_result or (after_result and plain["role"] == "user")
    return found


def as_result(message: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call as the user's message."""
    content = message["content"]
    text = content if isinstance(content, str) else "".join(p.get("text", "") for p in content)
    return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its calls as text after its content."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = "\n".join(
        f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        for call in (named_arguments(one["function"]) for one in calls)
    )
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return with_text(plain, f"\n{written}" if message["content"] else written)


def named_arguments(function: dict[str, Any]) -> dict[str, Any]:
    """Return a call in the order in which the format has it."""
    return {"name": function["name"], "arguments": function["arguments"]}


def with_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a message with a text at its end."""
    content = message["content"]
    copied = {
        **message,
        "content": [dict(p) for p in content] if isinstance(content, list) else content,
    }
    add_text(copied, text)
    return copied


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return two messages of one role as one; the first is a text."""
    content = second["content"]
    if isinstance(content, str):
        return {**second, "content": f"{first['content']}\n\n{content}"}
    return {**second, "content": [{"type": "text", "text": f"{first['content']}\n\n"}, *content]}
