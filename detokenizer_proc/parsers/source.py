"""The text a reader reads, which comes in parts, and the parser that a reader makes.

A reader is a generator: it takes text from the front, yields pieces, and yields None where it needs
more. It sees the same text however that was cut, so its pieces say the same. Text is taken once
and looked at once; what is unsettled can be had again, for what turns out not to be a call.
"""

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from headrace.detokenizer_proc.parsers.pieces import Piece, Thought
from headrace.detokenizer_proc.parsers.special_marks import SpecialMarks
from headrace.detokenizer_proc.parsers.stops import overlap

T = TypeVar("T")
Reading = Generator[Piece | None, None, T]  # None asks for more text

SPACE = re.compile(r"\s*")
NEVER = "(?!)"  # matches nothing


@functools.cache
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return what finds the first of `marks`, which are constants."""
    return re.compile("|".join(map(re.escape, marks)) or NEVER)


class TextSource:
    """Text that comes in parts."""

    def __init__(self, marks: SpecialMarks) -> None:
        """Begin a text; what spells one of the `marks` elsewhere than these stand is no mark."""
        self._marks = marks
        self._text = ""
        self._at = 0
        self._num_dropped = 0  # characters of the text before what is kept
        self._has_ended = False
        self._unsettled: list[str] = []

    @property
    def position(self) -> int:
        """Number of characters taken."""
        return self._num_dropped + self._at

    def give(self, text: str) -> None:
        """Append received text."""
        self._num_dropped += self._at
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Mark the end of the text."""
        self._has_ended = True

    def take(self, end: int) -> str:
        """Take the text up to position `end`."""
        taken = self._text[self._at : end]
        self._unsettled.append(taken)
        self._at = end
        return taken

    def settle(self) -> str:
        """Commit the text taken since the last commit, and return it."""
        taken = "".join(self._unsettled)
        self._unsettled.clear()
        return taken

    def rewind(self) -> None:
        """Put back the unsettled text."""
        taken = self.settle()
        if len(taken) <= self._at:
            self._at -= len(taken)
        else:
            self._num_dropped = self.position - len(taken)
            self._text = taken + self._text[self._at :]
            self._at = 0

    def peek(self) -> Reading[str]:
        """Return the next character, or nothing at the end."""
        while self._at == len(self._text) and not self._has_ended:
            yield None
        return self._text[self._at : self._at + 1]

    def has(self, literal: str) -> Reading[bool]:
        """Take `literal` if it comes next; return whether it does."""
        while (
            not self._has_ended
            and len(self._text) - self._at < len(literal)
            and literal.startswith(self._text[self._at :])
        ):
            yield None
        found = self._text.startswith(literal, self._at) and self._is_mark(literal, self._at)
        if found:
            self.take(self._at + len(literal))
        return found

    def _is_mark(self, literal: str, at: int) -> bool:
        """Whether what stands at a position of the kept text is more than its spelling."""
        return self._marks.allow(literal, self._num_dropped + at)

    def _first_of(self, marks: tuple[str, ...]) -> re.Match[str] | None:
        """Return where the first of `marks` stands in the kept text that is not taken."""
        at, pattern = self._at, any_of(marks)
        while found := pattern.search(self._text, at):
            if self._is_mark(found.group(), found.start()):
                break
            at = found.start() + 1
        return found

    def run(self, some: re.Pattern[str]) -> Reading[str]:
        """Take the longest run of characters of a class."""
        parts = []
        while True:
            found = some.match(self._text, self._at)
            assert found is not None, "a pattern that matches nothing, too"
            parts.append(self.take(found.end()))
            if self._at < len(self._text) or self._has_ended:
                return "".join(parts)
            yield None

    def before(self, marks: tuple[str, ...]) -> Reading[tuple[str, str]]:
        """Take text as far as it certainly precedes `marks`, or one of them.

        Returns:
            The text or the mark, and nothing for the other; nothing for both at the end.
        """
        while True:
            found = self._first_of(marks)
            end = found.start() if found else len(self._text)
            if not found and not self._has_ended:
                rest = self._text[self._at :]
                end -= max((overlap(rest, mark) for mark in marks), default=0)
            if end > self._at:
                return self.take(end), ""
            if found:
                return "", self.take(found.end())
            if self._has_ended:
                return "", ""
            yield None

    def until(self, marks: tuple[str, ...], make: Callable[[str], Piece]) -> Reading[str]:
        """Pass text on as it comes, up to one of `marks`, which stays unsettled.

        Returns:
            The mark, or nothing at the end of the text.
        """
        while True:
            self.settle()
            text, mark = yield from self.before(marks)
            if not text:
                return mark
            yield make(text)

    def scan(self, how_far: Callable[[str, int], int]) -> Reading[str]:
        """Take text up to the position that `how_far(text, start)` returns; "" at the end."""
        if not (yield from self.peek()):
            return ""
        return self.take(how_far(self._text, self._at))


class SourceParser:
    """The `OutputParser` that a reader makes."""

    def __init__(self, read: Callable[[TextSource], Reading[None]], marks: SpecialMarks) -> None:
        self.thought = range(0)
        self._source = TextSource(marks)
        self._reading = read(self._source)

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return the part that is final."""
        self._source.give(text)
        return self._news()

    def flush(self) -> list[Piece]:
        """Return the remaining text at the end."""
        self._source.end()
        return self._news()

    def _news(self) -> list[Piece]:
        news = []
        for piece in self._reading:
            if piece is None:
                break
            if isinstance(piece, Thought):
                end = self._source.position
                start = self.thought.start if self.thought else end - len(piece.text)
                self.thought = range(start, end)
            news.append(piece)
        return news
