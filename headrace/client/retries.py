"""Retry policy: which rejected requests to send again, and after how long. Pure.

Only requests that the server has not begun are repeated. Its answer is then 429, or 503 if it is
overloaded or incomplete.
"""

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

WORTH_RETRYING = (429, 503)
FIRST_WAIT_S = 0.5  # where the server does not say how long; then twice as long, each time
LONGEST_WAIT_S = 60.0  # a longer Retry-After is an error at once


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds of a `Retry-After` header: a number, or a date.

    Args:
        now: seconds since the epoch.
    """
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - now, 0.0)
    except ValueError:
        return None


class Retries:
    """The number of retries left. `max_retries` 0 is never."""

    def __init__(self, max_retries: int) -> None:
        self._max_retries = max_retries

    def wait_s(self, status: int, headers: Mapping[str, str], num_before: int) -> float | None:
        """Return how long to wait before asking again, or None where that is no use.

        Args:
            num_before: how many times it has been asked again already.
        """
        if status not in WORTH_RETRYING or num_before >= self._max_retries:
            return None
        server_wait_s = retry_after_s(headers, time.time())
        wait_s = FIRST_WAIT_S * 2**num_before if server_wait_s is None else server_wait_s
        return wait_s if wait_s <= LONGEST_WAIT_S else None
