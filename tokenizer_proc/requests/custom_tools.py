"""Custom tools, whose input is free text: to the model, functions of one string called `input`.

OpenAI's. A format of the input is written into the description, which the model reads. A regex
also holds where a call is demanded; a Lark grammar cannot be held within JSON, so such a demand is
refused.
https://platform.openai.com/docs/guides/function-calling#custom-tools
"""

from typing import Any, Literal

import msgspec

INPUT = "input"


class GrammarDefinition(msgspec.Struct):
    """The grammar of an input."""

    definition: str
    syntax: Literal["lark", "regex"]


class PlainTextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class GrammarFormat(msgspec.Struct, tag_field="type", tag="grammar"):
    """A text that follows a grammar."""

    grammar: GrammarDefinition


class CustomFunction(msgspec.Struct, omit_defaults=True):
    """A tool that takes a text."""

    name: str
    description: str | None = None
    format: PlainTextFormat | GrammarFormat | None = None

    @property
    def grammar(self) -> GrammarDefinition | None:
        """The grammar of its input, if it has one."""
        return self.format.grammar if isinstance(self.format, GrammarFormat) else None


class CustomTool(msgspec.Struct, omit_defaults=True, tag_field="type", tag="custom"):
    """An entry of `tools`."""

    custom: CustomFunction


class CalledCustomTool(msgspec.Struct):
    """A custom tool as the assistant has called it."""

    name: str
    input: str


def description_of(tool: CustomFunction) -> str | None:
    """Return the description of a tool for the model, its grammar included."""
    grammar = tool.grammar
    if grammar is None:
        return tool.description
    told = f"The input follows this {grammar.syntax} grammar:\n{grammar.definition}"
    return f"{tool.description}\n{told}" if tool.description else told


def parameters_of(tool: CustomFunction) -> dict[str, Any]:
    """Return the JSON Schema of the function that a tool is to the model."""
    text: dict[str, Any] = {"type": "string"}
    grammar = tool.grammar
    if grammar is not None and grammar.syntax == "regex":
        text["pattern"] = f"^(?:{grammar.definition})$"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
