"""Pieces of a model's output: content, thoughts, tool calls.

A parser splits text into pieces as it comes; a renderer writes them in an API's form.
So every API has every model's pieces, and neither depends on the other.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Words to the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Words of the model to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The begin of a call, the `index`-th of the answer."""

    index: int
    id: str
    name: str
    is_custom: bool = False  # of a custom tool, whose arguments are its input


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: JSON, once all of it is there, or a custom tool's input."""

    index: int
    text: str
    is_custom: bool = False


Piece = Content | Thought | ToolCallStart | Arguments


def joined(pieces: list[Piece]) -> list[Piece]:
    """Return the same pieces, those that go on with the one before them put together."""
    found: list[Piece] = []
    for piece in pieces:
        match found[-1:], piece:
            case [Content(before)], Content(text):
                found[-1] = Content(before + text)
            case [Thought(before)], Thought(text):
                found[-1] = Thought(before + text)
            case [Arguments(index, before, is_custom)], Arguments(other, text) if index == other:
                found[-1] = Arguments(index, before + text, is_custom)
            case _:
                found.append(piece)
    return found


class OutputParser(Protocol):
    """Splits the text of one sequence into pieces, as it comes."""

    @property
    def thought(self) -> range:
        """The range of the reasoning in the text, as far as it is final."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return the part that is final."""
        ...

    def flush(self) -> list[Piece]:
        """Return the remaining text at the end."""
        ...


class PlainParser:
    """All text is words to the reader."""

    thought = range(0)

    def feed(self, text: str) -> list[Piece]:
        """Return the text."""
        return [Content(text)] if text else []

    def flush(self) -> list[Piece]:
        """Return nothing: nothing was held back."""
        return []


class Call(NamedTuple):
    """A whole call of a tool."""

    id: str
    name: str
    arguments: str
    is_custom: bool = False  # whose arguments are its input


class Gathered(NamedTuple):
    """All pieces of a response that is sent whole."""

    text: str
    thought: str
    calls: list[Call]


def gathered(pieces: list[Piece]) -> Gathered:
    """Put the pieces of an answer together."""
    calls = {piece.index: piece for piece in pieces if isinstance(piece, ToolCallStart)}
    arguments: dict[int, str] = dict.fromkeys(calls, "")
    for piece in pieces:
        if isinstance(piece, Arguments):
            arguments[piece.index] += piece.text
    return Gathered(
        "".join(piece.text for piece in pieces if isinstance(piece, Content)),
        "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
        [
            Call(call.id, call.name, arguments[index], call.is_custom)
            for index, call in calls.items()
        ],
    )
