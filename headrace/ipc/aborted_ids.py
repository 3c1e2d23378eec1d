"""Ids of aborted requests, kept until the requests arrive: an abort may overtake its request.
Pure."""

from collections import OrderedDict

MAX_ABORTED = 4096  # older ones are forgotten


class AbortedIds:
    """Ids of aborted requests, as far as they are remembered."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, None] = OrderedDict()

    def add(self, request: int) -> None:
        """Add an id; its request may have arrived, or may still arrive."""
        self._requests[request] = None
        if len(self._requests) > MAX_ABORTED:
            self._requests.popitem(last=False)

    def __contains__(self, request: int) -> bool:
        return request in self._requests
