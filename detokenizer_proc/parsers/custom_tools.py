"""Calls of custom tools: their one argument is delivered as text, not as JSON."""

import msgspec

from headrace.detokenizer_proc.parsers.pieces import Arguments, OutputParser, Piece, ToolCallStart

INPUT = "input"  # the argument


class CustomToolParser:
    """A parser that delivers the input of custom tools as text, at the call's end."""

    def __init__(self, parser: OutputParser, names: frozenset[str]) -> None:
        self._parser = parser
        self._names = names
        self._call: int | None = None  # the index of the custom call that is being read
        self._arguments: list[str] = []

    @property
    def thought(self) -> range:
        """The range of the reasoning in the text."""
        return self._parser.thought

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return the part that is final."""
        return [out for piece in self._parser.feed(text) for out in self._converted(piece)]

    def flush(self) -> list[Piece]:
        """Return the remaining text at the end."""
        found = [out for piece in self._parser.flush() for out in self._converted(piece)]
        return found + self._ended()

    def _converted(self, piece: Piece) -> list[Piece]:
        if isinstance(piece, Arguments) and piece.index == self._call:
            self._arguments.append(piece.text)
            return []
        ended = self._ended()
        if isinstance(piece, ToolCallStart) and piece.name in self._names:
            self._call = piece.index
            piece = ToolCallStart(piece.index, piece.id, piece.name, is_custom=True)
        return [*ended, piece]

    def _ended(self) -> list[Piece]:
        """Return the input of the custom call that has been read, if there is one."""
        if self._call is None:
            return []
        out = Arguments(self._call, input_of("".join(self._arguments)), is_custom=True)
        self._call, self._arguments = None, []
        return [out] if out.text else []


def input_of(arguments: str) -> str:
    """Return a custom tool's input; text that is not written as one is returned unchanged."""
    try:
        found = msgspec.json.decode(arguments, type=dict[str, str])
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found.get(INPUT, arguments)
