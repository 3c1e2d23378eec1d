"""Parsing of a chat's answer: tool calls and reasoning beside content."""

from headrace.config.process_configs import ModelCard
from headrace.errors import Unsupported
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import BY_SCHEMA, begins_inside, is_closed
from headrace.tokenizer_proc.requests.openai import ChatRequest
from headrace.tokenizer_proc.requests.tools import string_parameters


def parsing_of(card: ModelCard, request: ChatRequest, prompt: str) -> Parsing | None:
    """Return what a chat's answer to `prompt` has in it; None is words and nothing else.

    Raises:
        Unsupported: there are tools, and it is not known how the model calls them.
    """
    if request.offered and card.tool_format is None:
        raise Unsupported(
            "tools: the format of this model's calls is unknown or not read; "
            "--tool-call-parser names one",
            "tools",
        )
    tools = card.tool_format if request.offered else None
    thoughts = card.thought_format
    continued = continued_text(request)
    if thoughts is not None and is_closed(thoughts, prompt, continued):
        thoughts = None
    if tools is None and thoughts is None:
        return None
    return Parsing(
        tools=tools,
        thoughts=thoughts,
        begins_inside=thoughts is not None and begins_inside(thoughts, prompt, continued),
        has_one_call=not request.may_repeat or request.names_one,
        hides_thoughts=not request.include_reasoning,
        string_parameters=string_parameters(request.offered) if tools in BY_SCHEMA else {},
        custom_tools=request.custom_tools if tools is not None else [],
    )


def continued_text(request: ChatRequest) -> str:
    """Return the text with which the answer begins already."""
    content = request.messages[-1].content
    return content if request.continue_final_message and isinstance(content, str) else ""
