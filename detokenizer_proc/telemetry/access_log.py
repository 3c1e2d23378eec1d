"""The access log: a line per request."""

import logging

from headrace.ipc.messages import RequestEnded
from headrace.logs import about

log = logging.getLogger(__name__)


class AccessLog:
    """Logs requests that have ended, whatever the level of the other lines is."""

    def __init__(self) -> None:
        log.setLevel(logging.INFO)

    def take(self, request: RequestEnded) -> None:
        """Log a request."""
        duration_ms = (request.ended_at - request.received_at) / 1e6
        path = ascii(request.path)[1:-1]  # a path may have the end of a line in it
        extra = about(
            request.request_id,
            method=request.method,
            path=request.path,
            status=request.status,
            duration_ms=round(duration_ms, 3),
            request_bytes=request.num_received,
            response_bytes=request.num_sent,
            complete=request.is_complete,
        )
        log.info(
            "%s %s %d %.1f ms, %d bytes in, %d out%s",
            request.method,
            path,
            request.status,
            duration_ms,
            request.num_received,
            request.num_sent,
            "" if request.is_complete else ", cut off",
            extra=extra,
        )
