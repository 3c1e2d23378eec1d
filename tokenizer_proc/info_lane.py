"""The process that answers GETs: it loads no tokenizer, so they wait for none."""

from headrace.board.backlog import tokenizer_backlog
from headrace.board.fields import TokenizerField
from headrace.config.config import TokenizerConfig
from headrace.ipc.frontend_links import FrontendLinks
from headrace.ipc.messages import Head, HttpRequest, ResponseFrames, ToTokenizer, frontend_of
from headrace.ipc.sockets import Inbox
from headrace.runtime.process import Context
from headrace.tokenizer_proc.info_routes import InfoRoutes
from headrace.tokenizer_proc.jobs.job import Job
from headrace.tokenizer_proc.jobs.stages import Answer, Body

IDLE_MS = 500


class InfoLane:
    """Requests of an inbox, answered one by one."""

    def __init__(
        self, config: TokenizerConfig, context: Context, inbox: Inbox[ToTokenizer]
    ) -> None:
        self._slot = context.slot
        self._inbox = inbox
        self._routes = InfoRoutes(config, context.board)
        self._backlog = tokenizer_backlog(context.board, context.index)
        self._frontends = FrontendLinks(
            config.run_dir, config.num_frontends, context.board, context.slot
        )

    def handle(self, timeout_ms: int = IDLE_MS) -> None:
        """Answer the next request, or return after `timeout_ms` without one."""
        received = self._inbox.receive(timeout_ms)
        if received is None:
            self._backlog.settle_idle()
            return
        self._answer(*received)

    def _answer(self, request: HttpRequest, body: Body) -> None:
        job = Job(request, len(body), self._routes.handle(request, body))
        if request.is_suspect:
            self._slot[TokenizerField.AT_HAND] = request.id
        job.begin()
        self._slot[TokenizerField.AT_HAND] = 0
        answer = job.outcome
        assert isinstance(answer, Answer)
        head = Head(answer.status, answer.content_type, headers=answer.headers)
        frames = ResponseFrames.of({request.id: head}, [request.id], [len(answer.body)], [True])
        self._frontends.send(frontend_of(request.id), frames, answer.body)
        self._slot.add(TokenizerField.REFUSED, answer.status >= 400)
        self._slot.add(TokenizerField.HANDLED)
        self._slot.add(TokenizerField.HANDLED_BYTES, len(body) + 1)
