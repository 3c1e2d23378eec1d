"""`functions` and `function_call` of a chat, which `tools` have replaced: made into those.

https://platform.openai.com/docs/api-reference/chat/create#chat_create-functions
"""

from typing import TYPE_CHECKING

from headrace.errors import InvalidValue
from headrace.tokenizer_proc.requests.tool_choices import FunctionName, NamedTool
from headrace.tokenizer_proc.requests.tools import CalledFunction, CalledTool, Tool

if TYPE_CHECKING:
    from headrace.tokenizer_proc.requests.openai import ChatRequest, RequestMessage

# The fields of `tools`, by the names of `functions`.
NAMES = {
    "tools": "functions",
    "tools[].function.name": "functions[].name",
    "tools[].function.parameters.type": "functions[].parameters.type",
    "tool_choice": "function_call",
    "tool_choice.function.name": "function_call.name",
}


def take_functions(request: "ChatRequest") -> None:
    """Put tools in the place of a request's functions. An answer calls one of them at most.

    Raises:
        InvalidValue: there are tools, too, or a function is demanded where there is none.
    """
    if request.functions is None:
        if isinstance(request.function_call, FunctionName):
            raise InvalidValue(
                "function_call: there must be 'functions' to choose from", "function_call"
            )
        return
    if request.tools is not None or request.tool_choice is not None:
        raise InvalidValue("functions: not together with 'tools'", "functions")
    request.tools = [Tool(function) for function in request.functions]
    wanted = request.function_call
    request.tool_choice = NamedTool(wanted) if isinstance(wanted, FunctionName) else wanted
    request.parallel_tool_calls = False


def take_called(messages: "list[RequestMessage]") -> None:
    """Put calls of tools, and what tools answer, in the place of those of functions.

    A message may have `tool_calls`, too: the call of a function comes after those, unless it is one
    of them.
    """
    last = ""
    for index, message in enumerate(messages):
        if message.function_call is not None:
            last = take_call(message, message.function_call, index)
        elif message.role == "function":
            message.role, message.tool_call_id = "tool", last


def take_call(message: "RequestMessage", function: CalledFunction, index: int) -> str:
    """Put a call of a function among a message's calls of tools; return its id."""
    calls = message.tool_calls or []
    same = next((call for call in calls if call.function == function), None)
    if same is None:
        # Nine characters, as Mistral's templates want.
        same = CalledTool(function, id=f"call{index:05}")
        calls = [*calls, same]
    message.tool_calls, message.function_call = calls, None
    return same.id or ""
