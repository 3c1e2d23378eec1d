"""Follows a text that copies earlier tokens of its own, and replaces some of them. Pure.

A search for the last tokens loses the place at each change. A variable that was renamed once is
expected to be renamed in its further places, too.
"""

from array import array

MAX_TRUST = 8  # right tokens that count
MISTRUST = 2  # right tokens that a wrong one takes away
LOST = -1


class EditedCopy:
    """The place that a sequence copies from, and what it writes for some tokens.

    What is copied lies in the sequence's own tokens.
    """

    def __init__(self) -> None:
        self._source = LOST  # the token that is expected next
        self._trust = 0
        self._edits: dict[int, list[int]] = {}
        self._replaced: int | None = None  # the token in whose place ...
        self._written: list[int] = []  # ... these came, and others may

    @property
    def goes_on(self) -> bool:
        """Whether further tokens are expected."""
        return self._source != LOST

    @property
    def is_edited(self) -> bool:
        """Whether the last token was not copied."""
        return self._replaced is not None

    def begin(self, source: int, trust: int) -> None:
        """Expect the tokens from `source` on, as so many before them have come."""
        self._source, self._trust = source, min(trust, MAX_TRUST)
        self._replaced, self._written = None, []

    def follow(self, tokens: "array[int]", at: int) -> None:
        """Compare the tokens from `at` on, which have come, with those that were expected."""
        for token in tokens[at:]:
            if self._source == LOST:
                return
            self._compare(token, tokens[self._source])

    def _compare(self, token: int, expected: int) -> None:
        known = self._edits.get(expected if self._replaced is None else self._replaced, [])
        if token == expected:
            if self._replaced is not None:
                self._edits[self._replaced] = self._written
                self._replaced, self._written = None, []
            else:
                self._edits.pop(expected, None)
            self._source += 1
            self._trust = min(MAX_TRUST, self._trust + 1)
            return
        if self._replaced is None:
            self._replaced, self._written = expected, []
            self._source += 1
        is_known = known[len(self._written) : len(self._written) + 1] == [token]
        self._written.append(token)
        self._trust -= 0 if is_known else MISTRUST
        if self._trust <= 0:
            self._source = LOST

    def suggest(self, tokens: "array[int]", length: int) -> "array[int]":
        """Return at most `length` tokens that are expected next, with the edits so far."""
        suggested = array("i")
        if self._replaced is not None:
            known = self._edits.get(self._replaced, [])
            if known[: len(self._written)] == self._written:
                suggested.extend(known[len(self._written) :])
        for token in tokens[self._source : self._source + length]:
            suggested.extend(self._edits.get(token, [token]))
        return suggested[:length]
