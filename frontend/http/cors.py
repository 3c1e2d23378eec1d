"""CORS: Starlette's policy, applied to our requests."""

from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from headrace.frontend.http.request import HttpExchange


class Cors:
    """The allowed origins."""

    def __init__(self, origins: Iterable[str]) -> None:
        """Allow these sites; `*` is all."""
        self._policy = CORSMiddleware(
            no_application, list(origins), allow_methods=["*"], allow_headers=["*"]
        )

    def look(self, request: HttpExchange) -> bool:
        """Set the answer's CORS headers; answer a preflight here. Return whether it was one."""
        headers = Headers(raw=list(request.headers))
        origin = headers.get("origin")
        if origin is None:
            return False
        if request.method == "OPTIONS" and "access-control-request-method" in headers:
            found = self._policy.preflight_response(headers)
            raw = [(name, value) for name, value in found.raw_headers if name != b"content-length"]
            request.respond(found.status_code, raw, bytes(found.body))
            return True
        common = Headers(headers=self._policy.simple_headers).mutablecopy()
        if not self._policy.allow_all_origins and self._policy.is_allowed_origin(origin):
            self._policy.allow_explicit_origin(common, origin)
        request.common = common.raw
        return False


async def no_application(*_: Any) -> None:
    """Stand in for the application of the policy, which is never called."""
