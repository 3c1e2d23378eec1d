"""Options of a request of `/v1/responses` that its response repeats.

https://platform.openai.com/docs/api-reference/responses/create
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class InputFormat(msgspec.Struct, omit_defaults=True):
    """`format` of a custom tool."""

    type: Literal["text", "grammar"]
    definition: str | None = None
    syntax: Literal["lark", "regex"] | None = None


class OfferedFunction(msgspec.Struct):
    """An entry of `tools`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | UnsetType = UNSET  # of a custom tool


class AllowedFunction(msgspec.Struct):
    """One of the allowed tools."""

    type: str
    name: str


class WantedFunction(msgspec.Struct, omit_defaults=True):
    """`tool_choice` of one tool, or of some, with type "allowed_tools"."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedFunction] | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """`text.format`."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """`text`."""

    format: TextFormat | None = None


class Reasoning(msgspec.Struct):
    """`reasoning`. Thoughts are not summarized."""

    effort: str | None = None
    summary: str | None = None
