"""Finds what a sequence's own tokens, or recent answers, suggest: prompt lookup decoding. Pure.

The last earlier occurrence of the final tokens is found. The tokens that followed it are likely to
follow again (Saxena, "Prompt Lookup Decoding", 2023).
"""

from array import array
from collections import deque
from typing import NamedTuple

from headrace.engine_proc.sequence.chunk import NO_TOKENS

MAX_ANSWERS = 16  # of other requests, that are looked at
MATCH_TOKENS = (8, 4, 3, 2)  # looked for in this order; see also `NGRAM_RATES`
COPY = 4  # tokens that are copied, and not there by chance


class Match(NamedTuple):
    """An earlier occurrence of a text's last `size` tokens, and what followed it.

    `size` may also be `COPIED` or `EDITED`. `end` is where the tokens that followed begin in the
    text itself; 0 is in another one.
    """

    size: int
    tokens: "array[int]"
    end: int = 0


NO_MATCH = Match(0, NO_TOKENS)


class RecentAnswers:
    """The newest answers. As with cached pages, none is found under another salt."""

    def __init__(self) -> None:
        self._answers: deque[tuple[bytes, array[int]]] = deque(maxlen=MAX_ANSWERS)  # with salts

    def add(self, salt: bytes, answer: "array[int]") -> None:
        """Keep an answer."""
        if len(answer) > MATCH_TOKENS[0]:
            self._answers.append((salt, answer))

    def look_up(self, salt: bytes, tokens: "array[int]", length: int) -> Match:
        """Return at most `length` tokens that followed the last ones of `tokens` in an answer."""
        size = MATCH_TOKENS[0]
        if len(tokens) < size:
            return NO_MATCH
        suffix = tokens[-size:].tobytes()
        for its_salt, answer in reversed(self._answers):
            if its_salt == salt:
                place = find_last(answer.tobytes(), suffix, answer.itemsize)
                if place is not None:
                    return Match(size, answer[place + size : place + size + length])
        return NO_MATCH


def look_up(tokens: "array[int]", length: int) -> Match:
    """Return the `length` tokens that followed the latest earlier occurrence of the last ones.

    Where the match overlaps the end, the text repeats itself, and so does the result.
    """
    data = tokens.tobytes()
    for size in MATCH_TOKENS:
        if len(tokens) <= size:
            continue
        place = find_last(data, tokens[-size:].tobytes(), tokens.itemsize)
        if place is not None:
            period = len(tokens) - size - place
            follow = tokens[place + size : place + size + length]
            while len(follow) < length:
                follow += follow[-period:][: length - len(follow)]
            return Match(size, follow, place + size)
    return NO_MATCH


def find_last(data: bytes, suffix: bytes, itemsize: int) -> int | None:
    """Return the index, in items, of the last place of `suffix` before the end of `data`."""
    end = len(data) - 1
    while (start := data.rfind(suffix, 0, end)) >= 0:
        if start % itemsize == 0:
            return start // itemsize
        end = start + len(suffix) - 1
    return None
