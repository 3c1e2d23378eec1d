"""The process that answers GETs: it loads no tokenizer, so they wait for none.

It also watches the ring, for `/ring` and the streams of `/ring/events`. While requests are open it
publishes `/metrics` each second: a frontend answers with that page where tokenizers are behind.
"""

import math

from headrace import routes
from headrace.board.backlog import tokenizer_backlog
from headrace.board.fields import TokenizerField
from headrace.config.process_configs import TokenizerConfig
from headrace.ipc.frontend_links import FrontendLinks
from headrace.ipc.messages import Head, HttpRequest, ResponseFrames, ToTokenizer, frontend_of
from headrace.ipc.published_page import METRICS, PublishedPage
from headrace.ipc.sockets import Inbox
from headrace.routes import HEAD
from headrace.runtime.process import Context
from headrace.tokenizer_proc.info_routes import InfoRoutes
from headrace.tokenizer_proc.jobs.aborts import Aborts
from headrace.tokenizer_proc.jobs.job import Job
from headrace.tokenizer_proc.jobs.stages import Body, ImmediateResponse, Stages
from headrace.tokenizer_proc.ring.event_streams import EventStreams

IDLE_MS = 500


class InfoLane:
    """Requests of an inbox, answered one by one, and events for those that stay open."""

    def __init__(
        self,
        config: TokenizerConfig,
        context: Context,
        inbox: Inbox[ToTokenizer],
        aborts: Aborts,
    ) -> None:
        self._slot = context.slot
        self._inbox = inbox
        self._routes = InfoRoutes(config, context.board)
        self._backlog = tokenizer_backlog(context.board, context.index)
        self._frontends = FrontendLinks(
            config.run_dir, config.num_frontends, context.board, context.slot
        )
        self._streams = EventStreams(context.board, self._frontends, aborts)
        self._backlogs = [tokenizer_backlog(context.board, i) for i in range(context.index)]
        self._published = PublishedPage(config.run_dir, METRICS)

    def handle(self, timeout_ms: int = IDLE_MS) -> None:
        """Answer the next request, or return after `timeout_ms` or when events are due."""
        until_events_ms = math.ceil(self._streams.wait_s * 1000)
        received = self._inbox.receive(min(timeout_ms, until_events_ms))
        if received is not None:
            self._handle(*received)
        elif until_events_ms >= timeout_ms:
            self._backlog.settle_idle()
        if self._streams.take_turn():
            self._streams.send(self._routes.monitor.events(are_wanted=len(self._streams) > 0))
            if any(backlog() > 0 for backlog in self._backlogs):  # frontends look at these, too
                self._published.write(self._routes.metrics.render())

    def _handle(self, request: HttpRequest, body: Body) -> None:
        job = Job(request, len(body), self._stages(request, body))
        if request.is_suspect:
            self._slot[TokenizerField.AT_HAND] = request.id
        job.begin()
        self._slot[TokenizerField.AT_HAND] = 0
        response = job.outcome
        assert isinstance(response, ImmediateResponse)
        self._send(request, response)
        self._slot.add(TokenizerField.REFUSED, response.status >= 400)
        self._slot.add(TokenizerField.HANDLED)
        self._slot.add(TokenizerField.HANDLED_BYTES, len(body) + 1)

    def _stages(self, request: HttpRequest, body: Body) -> Stages:
        """Answer a request, or say why not.

        Raises:
            RequestError: it is refused.
        """
        if request.path == routes.RING_EVENTS:
            self._streams.check_room()
        return (yield from self._routes.handle(request, body))

    def _send(self, request: HttpRequest, response: ImmediateResponse) -> None:
        """Send an answer, or the beginning of a stream: to HEAD, its head and its end."""
        id = request.id
        head = Head(response.status, response.content_type, headers=response.headers)
        if response.is_open and request.method == HEAD:
            frames = ResponseFrames.of({id: head}, [id, id], [0, 0], [False, True])
            self._frontends.send(frontend_of(id), frames, b"")
            return
        is_last = not response.is_open
        frames = ResponseFrames.of({id: head}, [id], [len(response.body)], [is_last])
        self._frontends.send(frontend_of(id), frames, response.body)
        if response.is_open:
            self._streams.open(id)

    def close(self) -> None:
        """Drop all links."""
        self._frontends.close()
