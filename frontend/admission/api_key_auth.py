"""Authentication of requests by API key."""

import hmac
from collections.abc import Iterable

from headrace.config.api_keys import digest


class ApiKeyAuth:
    """Valid API keys; without any, all requests are admitted."""

    def __init__(self, digests: Iterable[bytes]) -> None:
        self._digests = list(digests)

    def __len__(self) -> int:
        return len(self._digests)

    def admits(self, key: bytes | None) -> bool:
        """Whether a key is one of these.

        Takes as long for a wrong key as for a right one: keys are compared by digest, all of them.
        """
        if not self._digests:
            return True
        if key is None:
            return False
        given = digest(key)
        return sum([hmac.compare_digest(given, known) for known in self._digests]) > 0
