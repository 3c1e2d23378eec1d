"""Request handling of a frontend: bytes in, bytes out.

Bodies go to a tokenizer process as they came and answers are written as they come. Three kinds are
answered here: `/health` and its kin, files for browsers, and rejected requests.
"""

import time

from headrace.board.board import Board
from headrace.frontend.admin import Admin, is_for_operators
from headrace.frontend.admission.gate import Gate
from headrace.frontend.forwarder import Forwarder
from headrace.frontend.health import PATHS, health_of
from headrace.frontend.http.conformance import POST, head_fault
from headrace.frontend.http.cors import Cors
from headrace.frontend.http.rejections import Rejection
from headrace.frontend.http.request import HEAD, JSON, HttpExchange
from headrace.frontend.http.static_files import StaticFile, StaticFiles
from headrace.frontend.request_reports import RequestReports
from headrace.routes import GET, PING
from headrace.runtime.wake_clock import WakeClock

ONLY_ASKED = Rejection(
    405,
    "this path takes GET",
    "invalid_request_error",
    "method_not_allowed",
    allow=f"{GET}, {HEAD}",
)


class App:
    """Answers health checks and admin requests here, all else by the ring."""

    def __init__(
        self,
        board: Board,
        awake: WakeClock,
        forwarder: Forwarder,
        gate: Gate,
        admin: Admin,
        cors: Cors | None = None,
        files: StaticFiles | None = None,
        reports: RequestReports | None = None,
    ) -> None:
        self._board = board
        self._awake = awake
        self._forwarder = forwarder
        self._gate = gate
        self._admin = admin
        self._cors = cors
        self._files = files or StaticFiles({})
        self._reports = reports

    def __call__(self, request: HttpExchange) -> None:
        """Answer a request, now or when the ring does."""
        fault = head_fault(request.version, request.head)
        if fault is not None:
            request.refuse(fault)
        elif self._cors is not None and self._cors.look(request):
            pass  # it has been answered
        elif request.path in PATHS:
            self._write_health(request)
        elif is_for_operators(request.path):
            self._administer(request)
        elif (file := self._files.find(request)) is not None:
            self._serve_file(request, file)
        elif request.method == POST and self._admin.guards(request.path):
            rejection = self._admin.refuse(request.path, request.head.key)
            if rejection is None:
                self._forwarder.begin(request, has_admin_key=True)
                return
            request.refuse(rejection)
        else:
            self._forwarder.begin(request)
            return
        if self._reports is not None:
            self._reports.put(request)

    def _write_health(self, request: HttpExchange) -> None:
        if request.method not in (GET, HEAD) and request.path != PING:
            request.refuse(ONLY_ASKED)
            return
        now_ns = time.monotonic_ns()
        since_ns = self._awake.look(now_ns)
        found = health_of(self._board, request.path, self._gate.is_closed, now_ns, since_ns)
        request.respond(found.status, [(b"content-type", JSON)], found.body)

    def _serve_file(self, request: HttpExchange, file: StaticFile) -> None:
        if request.method in (GET, HEAD):
            file.respond(request)
        else:
            request.refuse(ONLY_ASKED)

    def _administer(self, request: HttpExchange) -> None:
        key = request.head.key
        response = self._admin.handle(request.method, request.path, request.query, key)
        if isinstance(response, Rejection):
            request.refuse(response)
        else:
            request.respond(response.status, [(b"content-type", JSON)], response.body)
