"""`tool_choice` of a chat: of one tool, or of some of those that are offered.

https://platform.openai.com/docs/api-reference/chat/create#chat_create-tool_choice
"""

from typing import Literal

import msgspec

from headrace.errors import InvalidValue


class FunctionName(msgspec.Struct):
    """The name of the chosen tool."""

    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """A function by name."""

    function: FunctionName

    @property
    def name(self) -> str:
        """Its name."""
        return self.function.name


class NamedCustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """A custom tool by name."""

    custom: FunctionName

    @property
    def name(self) -> str:
        """Its name."""
        return self.custom.name


class Allowed(msgspec.Struct):
    """`tool_choice.allowed_tools`."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool | NamedCustomTool]


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """Some of the tools: the model does not hear of the others."""

    allowed_tools: Allowed

    @property
    def names(self) -> set[str]:
        """The tools that may be called."""
        return {tool.name for tool in self.allowed_tools.tools}


ToolChoice = Literal["auto", "none", "required"] | NamedTool | NamedCustomTool | AllowedTools


def check_choice(choice: ToolChoice | None, names: set[str]) -> None:
    """Refuse the choice of a tool that is not there."""
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise InvalidValue("tool_choice: there must be 'tools' to choose from", "tool_choice")
    if isinstance(choice, AllowedTools):
        where = "tool_choice.allowed_tools.tools"
        if not choice.allowed_tools.tools:
            raise InvalidValue(f"{where}: must not be empty", where)
        for index, tool in enumerate(choice.allowed_tools.tools):
            check_name(tool, names, f"{where}[{index}]")
    elif isinstance(choice, NamedTool | NamedCustomTool):
        check_name(choice, names, "tool_choice")


def check_name(tool: NamedTool | NamedCustomTool, names: set[str], where: str) -> None:
    """Refuse the name of a tool that is not there."""
    kind = "function" if isinstance(tool, NamedTool) else "custom"
    if tool.name not in names:
        where = f"{where}.{kind}.name"
        raise InvalidValue(f"{where}: '{tool.name}' is none of the tools", where)
