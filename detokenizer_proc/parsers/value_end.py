"""Finds the end of a value written like JSON or Python. It reads only brackets and strings, so a
value may come in parts and is passed on before its end is known."""

import re

CLOSERS = {"{": "}", "[": "]", "(": ")"}


class Syntax:
    """Characters with a meaning outside strings, and the string delimiters."""

    def __init__(self, between: str, openers: str, quotes: str) -> None:
        self.between = re.compile(f"[{between}]*")
        self.openers = openers
        self.quotes = quotes
        self.within = {quote: re.compile(rf"[^{quote}\\]*") for quote in quotes}


JSON = Syntax(r"\s,:\w+\-.", "{[", '"')
PYTHON = Syntax(r"\s,:\w+\-.=", "{[(", "\"'")


class Shape:
    """A value that begins with a bracket or a quote."""

    def __init__(self, syntax: Syntax = JSON) -> None:
        self._syntax = syntax
        self._closers: list[str] = []
        self._quote = ""
        self._is_escaped = False
        self.is_whole = False
        self.is_broken = False  # what comes next cannot belong to a value

    @property
    def is_over(self) -> bool:
        """Whether the value is complete."""
        return self.is_whole or self.is_broken

    def scan(self, text: str, start: int) -> int:
        """Scan `text` from `start` on; return the end of the part that belongs to the value."""
        at = start
        while at < len(text) and not self.is_over:
            at = self._within(text, at) if self._quote else self._between(text, at)
        return at

    def _within(self, text: str, at: int) -> int:
        """Skip to the end of a string."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = self._syntax.within[self._quote].match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        self._is_escaped = text[at] == "\\"
        if not self._is_escaped:
            self._quote = ""
            self.is_whole = not self._closers
        return at + 1

    def _between(self, text: str, at: int) -> int:
        """Skip past the next bracket or quote."""
        if self._closers:
            found = self._syntax.between.match(text, at)
            assert found is not None
            at = found.end()
            if at == len(text):
                return at
        char = text[at]
        if char in self._syntax.quotes:
            self._quote = char
        elif char in self._syntax.openers:
            self._closers.append(CLOSERS[char])
        elif self._closers and char == self._closers[-1]:
            self._closers.pop()
            self.is_whole = not self._closers
        else:
            self.is_broken = True
            return at
        return at + 1
