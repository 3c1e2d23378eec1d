"""Frontend process: HTTP in, HTTP out; no JSON, no text, no tokens.
In: ToFrontend (detokenizer_proc; tokenizer_proc, early answers).  Out: ToTokenizer, ToEngine."""

import asyncio
import logging
import shutil
import socket
import time
from functools import partial
from typing import Any

import uvicorn
import uvloop

from headrace.board.backlog import frontend_backlog
from headrace.board.fields import FrontendField
from headrace.config.process_configs import FrontendConfig
from headrace.frontend.admin import Admin
from headrace.frontend.admission.admission import Admission, AdmissionLimits
from headrace.frontend.admission.api_key_auth import ApiKeyAuth
from headrace.frontend.admission.gate import Gate
from headrace.frontend.app import App
from headrace.frontend.dispatcher import Dispatcher
from headrace.frontend.forwarder import Forwarder
from headrace.frontend.http.connection import PATIENCE_S, READER_PATIENCE_S, Connection
from headrace.frontend.http.cors import Cors
from headrace.frontend.http.deadlines import Deadlines
from headrace.frontend.http.start_queue import StartQueue
from headrace.frontend.http.static_files import StaticFiles
from headrace.frontend.loop_lag import LoopLag
from headrace.frontend.open_requests import OpenRequests
from headrace.frontend.request_reports import RequestReports
from headrace.ipc.messages import ToFrontend
from headrace.ipc.published_page import METRICS, PublishedPage
from headrace.ipc.router import Router
from headrace.ipc.sockets import STEP_HIGH_WATER, Inbox, address, deliver
from headrace.runtime.process import DRAIN, LEAVE, Context
from headrace.runtime.wake_clock import WakeClock
from headrace.system.file_limit import files_besides, raise_file_limit
from headrace.system.malloc import return_large

HEARTBEAT_S = 0.1
# A request sent into a closing connection gets no answer. Proxies close their connections after a
# minute, so the server closes later.
KEEP_ALIVE_S = 75
LINGER_S = 0.5  # during which open connections may still send requests after a replacement
LAST_REPORTS_MS = 1000  # for the last reports to go
GRACE_S = 1  # connections that do not close by then are cut when the server stops


def main(config: FrontendConfig, context: Context) -> None:
    """Serve HTTP until SIGTERM."""
    return_large()
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of each client's bad HTTP
    try:
        uvloop.run(Frontend(config, context).serve())
    finally:
        if context.orphaned:
            # The supervisor was killed, and with it all processes except the frontends. Their loop
            # never blocks, so they remove the run directory.
            shutil.rmtree(config.run_dir, ignore_errors=True)


class Frontend:
    """One HTTP server and its links."""

    def __init__(self, config: FrontendConfig, context: Context) -> None:
        """Bind the inbox; in the thread whose event loop will run."""
        self._config = config
        self._context = context
        self._slot = context.slot
        self._inbox: Inbox[ToFrontend] = Inbox(
            address(config.run_dir, "frontend", context.index),
            ToFrontend,
            STEP_HIGH_WATER,
            context.tee,
        )
        self._links = Router(config.run_dir, config.num_tokenizers, context.board, context.slot)
        self._open_requests = OpenRequests(context.index, context.slot)
        limits = AdmissionLimits(
            num_waiting_tokens=config.max_queued_tokens,
            num_body_bytes=config.max_kept_bytes,
        )
        key_auth = ApiKeyAuth(config.api_key_digests)
        self._gate = Gate(
            key_auth,
            Admission(limits),
            config.max_body_bytes,
            context.board,
            context.slot,
            [model.max_num_requests for model in config.models],
        )
        self._reports: RequestReports | None = None
        if config.reports:
            self._reports = RequestReports(config.run_dir, context.slot, config.traces)
        self._forwarder = Forwarder(
            self._open_requests,
            self._links,
            context.slot,
            self._gate,
            config.max_body_bytes,
            config.pages,
            config.anthropic_pages,
            self._reports,
            metrics=PublishedPage(config.run_dir, METRICS),
        )
        admins = ApiKeyAuth(config.admin_key_digests)
        admin = Admin(
            admins,
            context.board,
            context.slot,
            context.parent,
            config.profiles,
            config.opens_adapters,
            config.models,
        )
        cors = Cors(config.allowed_origins) if config.allowed_origins else None
        self._awake = WakeClock()
        files = StaticFiles.read(has_ui=config.ui)
        app = App(
            context.board,
            self._awake,
            self._forwarder,
            self._gate,
            admin,
            cors,
            files,
            self._reports,
        )
        self._deadlines: Deadlines[Connection] = Deadlines(PATIENCE_S)
        self._readers: Deadlines[Connection] = Deadlines(READER_PATIENCE_S)
        self._server = uvicorn.Server(self._uvicorn_config(app))
        self._is_leaving = False

    def _uvicorn_config(self, app: Any) -> uvicorn.Config:
        num_processes = len(self._context.board.slots)
        max_connections = raise_file_limit(num_processes) - files_besides(num_processes)
        connection: Any = partial(
            Connection,
            self._deadlines,
            self._readers,
            StartQueue(after=self._links.flush),
            max_connections,
            is_leaving=lambda: self._is_leaving,
            on_parting=partial(self._slot.add, FrontendField.PARTINGS),
        )
        return uvicorn.Config(
            app,
            http=connection,
            loop="none",  # it is running already
            ws="none",
            interface="asgi3",
            lifespan="off",
            proxy_headers=False,  # a middleware on every request; client addresses are not used
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            ssl_certfile=self._config.ssl_certfile,
            ssl_keyfile=self._config.ssl_keyfile,
        )

    async def serve(self) -> None:
        """Accept connections from the supervisor's socket."""
        loop = asyncio.get_running_loop()
        dispatcher = Dispatcher(loop, self._open_requests, self._slot)
        self._inbox.attach(loop, dispatcher.take)
        lag = LoopLag(loop, self._slot)
        with socket.socket(fileno=self._config.listen_fd) as listener:
            async with asyncio.TaskGroup() as tasks:  # where one fails, both end
                beating = tasks.create_task(self._beat(loop, dispatcher))
                lag.start()
                loop.add_signal_handler(DRAIN, self._drain)
                loop.add_signal_handler(LEAVE, self._leave)
                self._context.ready()
                await self._server.serve(sockets=[listener])
                beating.cancel()
        self._inbox.close()
        self._links.close()
        if self._reports is not None:
            self._reports.flush()
            deliver(LAST_REPORTS_MS)

    async def _beat(self, loop: asyncio.AbstractEventLoop, dispatcher: Dispatcher) -> None:
        """Keep the board current; retry what a full link has refused; look at the clock."""
        backlog = frontend_backlog(self._context.board, self._context.index)
        backlog.settle()
        num_taken = -1
        while True:
            if num_taken == self._slot[FrontendField.MESSAGES_TAKEN] and not dispatcher:
                backlog.settle_idle()
            num_taken = self._slot[FrontendField.MESSAGES_TAKEN]
            self._forwarder.resend()
            if self._server.should_exit and not self._is_leaving:
                self._end_streams()
            self._slot.beat()
            self._awake.look(time.monotonic_ns())
            self._slot[FrontendField.CONNECTIONS] = len(self._server.server_state.connections)
            self._slot[FrontendField.ANSWERED] = self._server.server_state.total_requests
            self._slot.open_ids = self._open_requests.ids
            self._open_requests.cut_slowest()
            self._slot[FrontendField.UNSENT_BYTES] = self._open_requests.num_unsent_bytes
            self._gate.observe(loop.time())
            self._links.flush()
            if self._reports is not None:
                self._reports.flush()
            self._links.renew(self._open_requests.ids)
            for connection in self._deadlines.passed(loop.time()):
                connection.on_deadline()
            for connection in self._readers.passed(loop.time()):
                connection.on_reader_deadline()
            await asyncio.sleep(HEARTBEAT_S)

    def _drain(self) -> None:
        """Accept no more requests; the supervisor waits until the open ones are answered."""
        self._gate.is_closed = True
        self._slot[FrontendField.IS_CLOSED] = 1

    def _leave(self) -> None:
        """End when open requests are answered. New connections wait for the next in this seat.

        A close before the first request would lose a request that is on its way. So the connection
        has the time that any has (`PATIENCE_S`).
        """
        self._is_leaving = True
        self._slot[FrontendField.IS_LEAVING] = 1
        self._server.config.timeout_graceful_shutdown = self._config.drain_timeout
        for server in self._server.servers:
            server.close()

        loop = asyncio.get_running_loop()

        def end() -> None:
            connections = self._server.server_state.connections
            if any(isinstance(c, Connection) and c.is_new for c in connections):
                loop.call_later(LINGER_S, end)
            else:
                self._server.should_exit = True

        loop.call_later(LINGER_S, end)

    def _end_streams(self) -> None:
        """End what still runs when the server stops: on purpose, so nothing to complain of."""
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        for open_request in self._open_requests:
            open_request.drop()
