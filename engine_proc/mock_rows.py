"""The texts that the mock engine generates, as columns: nothing is done per sequence in a step."""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]


class Rows:
    """The sequences of one detokenizer that generate; each gets a token per step."""

    def __init__(self, capacity: int, words: Words) -> None:
        """Every text says `words`, token ids, again and again from the first."""
        self._ids = np.zeros(capacity, np.uint64)
        self._starts = np.zeros(capacity, np.int64)  # the step of the first token
        self._words = words
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, id: int, step: int) -> None:
        """Begin a text in a step."""
        place = len(self._places)
        self._ids[place] = id
        self._starts[place] = step
        self._places[id] = place

    def remove(self, id: int) -> int:
        """End a text; return the step it began in. The last one takes its place."""
        place, last = self._places.pop(id), len(self._places)
        start = int(self._starts[place])
        if place != last:
            self._places[int(self._ids[last])] = place
            self._ids[place] = self._ids[last]
            self._starts[place] = self._starts[last]
        return start

    def place(self, id: int) -> int:
        """Return the place of a text in the columns."""
        return self._places[id]

    @property
    def ids(self) -> bytes:
        """The sequences, u64, in the order of the columns."""
        return self._ids[: len(self)].tobytes()

    def tokens(self, step: int) -> bytes:
        """Return each text's token of a step, u32."""
        said = (step - self._starts[: len(self)]) % len(self._words)
        return self._words[said].tobytes()
