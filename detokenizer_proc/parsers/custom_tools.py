"""Calls of custom tools: their one argument is told as text, not as JSON."""

import msgspec

from headrace.detokenizer_proc.parsers.pieces import Arguments, OutputParser, Piece, ToolCallStart

INPUT = "input"  # the argument


class CustomToolParser:
    """A parser whose calls of some tools are told with their input, at the call's end."""

    def __init__(self, parser: OutputParser, names: frozenset[str]) -> None:
        self._parser = parser
        self._names = names
        self._call: int | None = None  # the index of the custom call that is being read
        self._arguments: list[str] = []

    @property
    def thought(self) -> range:
        """Where in the text the thought is."""
        return self._parser.thought

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what has become certain."""
        return [told for piece in self._parser.feed(text) for told in self._told(piece)]

    def flush(self) -> list[Piece]:
        """Return what is left, where the text has ended."""
        found = [told for piece in self._parser.flush() for told in self._told(piece)]
        return found + self._ended()

    def _told(self, piece: Piece) -> list[Piece]:
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
        told = Arguments(self._call, input_of("".join(self._arguments)), is_custom=True)
        self._call, self._arguments = None, []
        return [told] if told.text else []


def input_of(arguments: str) -> str:
    """Return a custom tool's input. What the model has not written as one is told as it is."""
    try:
        found = msgspec.json.decode(arguments, type=dict[str, str])
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found.get(INPUT, arguments)
