"""Which marks of a format are special tokens, and where in a text these stand.

Text that merely spells such a mark, from ordinary tokens, is text.
"""

from collections.abc import Mapping


class SpecialMarks:
    """The special tokens of one text that a parser reads as marks."""

    def __init__(self, tokens: Mapping[int, str] | None = None) -> None:
        """Begin a text; `tokens` are the marks that are special tokens, by id."""
        self.tokens = tokens or {}
        self._names = frozenset(self.tokens.values())
        self._places = set[int]()
        self._offsets: dict[str, list[int]] = {}

    def note(self, id: int, end: int, text: str) -> None:
        """Note a token whose `text` ends at a place of the whole text, if it is a mark."""
        name = self.tokens.get(id)
        if name is not None and text.endswith(name):
            self._places.add(end - len(name))

    def allow(self, literal: str, place: int) -> bool:
        """Whether a literal that stands at a place is what a parser looks for.

        It is unless a special token's name in it is spelled by other tokens.
        """
        if not self._names:
            return True
        offsets = self._offsets.get(literal)
        if offsets is None:
            found = [literal.find(name) for name in self._names]
            offsets = self._offsets[literal] = [offset for offset in found if offset >= 0]
        return all(place + offset in self._places for offset in offsets)
