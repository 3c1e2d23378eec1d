"""Tools in requests: definitions, the choice, and earlier calls."""

import re
from typing import Any, Literal

import msgspec

from headrace.errors import InvalidValue, Unsupported
from headrace.tokenizer_proc.requests.custom_tools import (
    INPUT,
    CalledCustomTool,
    CustomTool,
    description_of,
    parameters_of,
)
from headrace.tokenizer_proc.requests.sampling import SamplingFields
from headrace.tokenizer_proc.requests.tool_choices import (
    AllowedTools,
    NamedCustomTool,
    NamedTool,
    ToolChoice,
    check_choice,
)

MAX_TOOLS = 128  # as with OpenAI
MAX_TOOLS_BYTES = 256 << 10  # as JSON, all of them
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Function(msgspec.Struct, omit_defaults=True):
    """A function that a model may call. `parameters` is a JSON Schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, omit_defaults=True, tag_field="type", tag="function"):
    """An entry of `tools`."""

    function: Function


class CalledFunction(msgspec.Struct):
    """A function as the assistant has called it. Arguments are JSON, or an object already."""

    name: str
    arguments: str | dict[str, Any] = ""


class CalledTool(msgspec.Struct):
    """An entry of a message's `tool_calls`."""

    function: CalledFunction | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    custom: CalledCustomTool | None = None


class ToolFields(SamplingFields, kw_only=True):
    """Fields of requests that generate and may call tools."""

    tools: list[Tool | CustomTool] | None = None
    tool_choice: ToolChoice | None = None  # None is auto
    parallel_tool_calls: bool | None = None  # None is yes

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called, as functions."""
        choice = self.tool_choice
        if choice == "none" or not self.tools:
            return []
        tools = [as_function(tool) for tool in self.tools]
        if isinstance(choice, AllowedTools):
            return [tool for tool in tools if tool.function.name in choice.names]
        return tools

    @property
    def custom_tools(self) -> list[str]:
        """The names of those whose input is free text."""
        return [tool.custom.name for tool in self.tools or () if isinstance(tool, CustomTool)]

    @property
    def names_one(self) -> bool:
        """Whether it demands a call of one tool by name."""
        return isinstance(self.tool_choice, NamedTool | NamedCustomTool)

    @property
    def demanded(self) -> list[Tool]:
        """The tools of which one has to be called; none where the model is free."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool | NamedCustomTool):
            return [t for t in self.offered if t.function.name == choice.name]
        if isinstance(choice, AllowedTools):
            return self.offered if choice.allowed_tools.mode == "required" else []
        return self.offered if choice == "required" else []

    @property
    def may_repeat(self) -> bool:
        """Whether there may be several calls in an answer."""
        return self.parallel_tool_calls is not False


def check_tools(request: ToolFields) -> None:
    """Refuse tools that cannot be offered, and the choice of one that is not."""
    check_choice(request.tool_choice, check_offered(request.tools or []))
    if request.tools:
        check_custom(request)


def check_offered(tools: list[Tool | CustomTool]) -> set[str]:
    """Refuse tools that cannot be offered; return the names of those that can."""
    if not tools:  # nearly always
        return set()
    if len(tools) > MAX_TOOLS:
        raise InvalidValue(
            f"tools: must have at most {MAX_TOOLS} entries, not {len(tools)}", "tools"
        )
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        raise InvalidValue(
            f"tools: must have at most {MAX_TOOLS_BYTES} bytes as JSON, not {size}", "tools"
        )
    seen = set[str]()
    for index, given in enumerate(tools):
        tool, kind = as_function(given), "custom" if isinstance(given, CustomTool) else "function"
        name, where = tool.function.name, f"tools[{index}].{kind}.name"
        if not NAME.fullmatch(name):
            raise InvalidValue(f"{where}: must be 1 to 64 of a-z, A-Z, 0-9, _ and -", where)
        if name in seen:
            raise InvalidValue(f"{where}: '{name}' is there already", where)
        seen.add(name)
        if (tool.function.parameters or {}).get("type", "object") != "object":
            where = f"tools[{index}].function.parameters.type"
            raise InvalidValue(f"{where}: must be 'object'", where)
    return seen


def check_custom(request: ToolFields) -> None:
    """Refuse to demand a call whose input follows a Lark grammar."""
    demanded = {tool.function.name for tool in request.demanded}
    for index, tool in enumerate(request.tools or ()):
        if not isinstance(tool, CustomTool) or tool.custom.name not in demanded:
            continue
        if tool.custom.grammar is not None and tool.custom.grammar.syntax == "lark":
            where = f"tools[{index}].custom.format"
            raise Unsupported(
                f"{where}: a 'lark' grammar is not held where a call is demanded; use 'regex', or "
                "'tool_choice': 'auto'",
                where,
            )


def as_function(tool: Tool | CustomTool) -> Tool:
    """Return a tool as the function that the model sees."""
    if isinstance(tool, Tool):
        return tool
    custom = tool.custom
    return Tool(Function(custom.name, description_of(custom), parameters_of(custom)))


def as_template_call(call: CalledTool, where: str) -> dict[str, Any]:
    """Return a call as templates expect it: with arguments that are an object where they can be."""
    if call.custom is not None:
        function: dict[str, Any] = {"name": call.custom.name}
        function["arguments"] = {INPUT: call.custom.input}
    elif call.function is not None:
        arguments = arguments_of(call.function.arguments)
        function = {"name": call.function.name, "arguments": arguments}
    else:
        raise InvalidValue(f"{where}: must have a 'function', or a 'custom' one", where)
    described: dict[str, Any] = {"type": "function", "function": function}
    return described if call.id is None else described | {"id": call.id}


def arguments_of(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return the arguments of a call; none is no arguments.

    A text that is no JSON object stays as it is: the call was cut off, or the model erred.
    """
    if isinstance(arguments, dict):
        return arguments
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return arguments


def string_parameters(tools: list[Tool]) -> dict[str, list[str]]:
    """Return by tool the parameters that are strings and nothing else."""
    return {tool.function.name: strings_of(tool.function.parameters or {}) for tool in tools}


def strings_of(schema: dict[str, Any]) -> list[str]:
    """Return the properties of a schema that are strings."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return []
    return [name for name, one in properties.items() if is_string(one)]


def is_string(schema: Any) -> bool:
    """Whether a schema takes strings only."""
    return isinstance(schema, dict) and schema.get("type") == "string"
