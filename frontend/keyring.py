"""Who may come in."""

import hmac
from collections.abc import Iterable

from headrace.api_keys import digest

SCHEME = b"bearer "


class Keyring:
    """The API keys that a server takes; without any, everybody may come in."""

    def __init__(self, digests: Iterable[bytes]) -> None:
        self._digests = list(digests)

    def admits(self, authorization: bytes | None) -> bool:
        """Whether an Authorization header has one of the keys.

        Takes as long for a wrong key as for a right one: keys are compared by digest, all of them.
        """
        if not self._digests:
            return True
        value = authorization or b""
        if value[: len(SCHEME)].lower() != SCHEME:
            return False
        given = digest(value[len(SCHEME) :].strip())
        return sum([hmac.compare_digest(given, known) for known in self._digests]) > 0
