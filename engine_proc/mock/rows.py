"""The sequences that the mock engine generates, as columns.

A step does no work per sequence, except for sequences with a text of their own.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]


class Rows:
    """The sequences of one detokenizer that generate; each gets a token per step."""

    def __init__(self, capacity: int, words: Words) -> None:
        """Every text repeats `words`, token ids."""
        self._ids = np.zeros(capacity, np.uint64)
        self._leads = np.zeros(capacity, np.int64)  # words that it is ahead of the step's number
        self._words = np.concatenate([words, words])  # no text is further ahead than all of them
        self._num_words = len(words)
        self._places: dict[int, int] = {}
        self._own: dict[int, tuple[Words, int]] = {}  # by sequence, its words and first step
        self.ids = b""  # the sequences, u64, in the order of the columns

    def __len__(self) -> int:
        return len(self._places)

    def add(self, id: int, step: int, words: Words | None = None) -> None:
        """Begin a text in a step; `words` are its own, at least one."""
        if words is not None:
            self._own[id] = (words, step)
        place = len(self._places)
        self._ids[place] = id
        self._leads[place] = -step % self._num_words
        self._places[id] = place
        self.ids = self._ids[: place + 1].tobytes()

    def remove(self, id: int) -> None:
        """End a text. The last one takes its place."""
        self._own.pop(id, None)
        place, last = self._places.pop(id), len(self._places)
        if place != last:
            self._places[int(self._ids[last])] = place
            self._ids[place] = self._ids[last]
            self._leads[place] = self._leads[last]
        self.ids = self._ids[:last].tobytes()

    def place(self, id: int) -> int:
        """Return the place of a text in the columns."""
        return self._places[id]

    def tokens(self, step: int) -> bytes:
        """Return each text's token of a step, u32."""
        said = self._words[step % self._num_words :]
        tokens = said.take(self._leads[: len(self._places)])
        for id, (words, first) in self._own.items():
            tokens[self._places[id]] = words[(step - first) % len(words)]
        data: bytes = tokens.tobytes()
        return data
