"""Service counters of API keys (users), for fair scheduling. Pure.

VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from collections import Counter, OrderedDict

MAX_KEYS = 4096  # that have nothing here and whose service is still remembered


class FairShare:
    """Counts computed tokens by key. A key earns no credit while it has no requests."""

    def __init__(self) -> None:
        self._num_sequences: Counter[int] = Counter()  # of the keys that have some
        self._served: OrderedDict[int, int] = OrderedDict()  # longest unseen first

    def enter(self, key: int) -> None:
        """Note that a sequence of a key came."""
        if not self._num_sequences[key]:
            others = (self._served[k] for k in self._num_sequences if k != key)
            self._served[key] = max(self._served.get(key, 0), min(others, default=0))
            self._served.move_to_end(key)
        self._num_sequences[key] += 1

    def leave(self, key: int) -> None:
        """Record the end of a sequence of a key."""
        self._num_sequences[key] -= 1
        if not self._num_sequences[key]:
            del self._num_sequences[key]
            self._served.move_to_end(key)
            if len(self._served) - len(self._num_sequences) > MAX_KEYS:
                oldest = next(k for k in self._served if k not in self._num_sequences)
                del self._served[oldest]

    def charge(self, key: int, num_tokens: int) -> None:
        """Note that tokens were computed for a key that has a sequence here."""
        self._served[key] += num_tokens

    def served(self, key: int) -> int:
        """Return the tokens computed for a key that has a sequence here."""
        return self._served[key]
