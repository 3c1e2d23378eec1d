"""What a server tells of itself: paths that take GET, and need no tokenizer."""

from headrace import __version__
from headrace.board.board import Board
from headrace.board.http_counts import GET, HEAD, POST, SERVED
from headrace.config.config import TokenizerConfig
from headrace.config.model_list import PATH, model_pages
from headrace.errors import MethodNotAllowed, ModelNotFound, RouteNotFound
from headrace.ipc.messages import HttpRequest
from headrace.metrics.headrace_metrics import CONTENT_TYPE, MetricsPage
from headrace.tokenizer_proc.jobs.stages import Answer, Body, Handler, Stages, json_answer
from headrace.tokenizer_proc.openapi import server_info
from headrace.tokenizer_proc.openapi.docs_page import CONTENT_TYPE as HTML
from headrace.tokenizer_proc.openapi.docs_page import docs_page
from headrace.tokenizer_proc.openapi.openapi import openapi


class InfoRoutes:
    """The paths that take GET, but for `/health` and its kin. HEAD is answered as GET is."""

    def __init__(self, config: TokenizerConfig, board: Board) -> None:
        self._card = config.card
        self._board = board
        self._models = model_pages(config.card, config.started_at)
        self._metrics = MetricsPage(board, config.card, config.metrics_dialect)
        self.handlers: dict[str, Handler] = {
            PATH: self._model,
            "/version": lambda *_: json_answer({"version": __version__}),
            "/load": lambda *_: json_answer(server_info.load(board)),
            "/model_info": lambda *_: json_answer(server_info.model_info(config.card)),
            "/get_model_info": lambda *_: json_answer(server_info.model_info(config.card)),
            "/server_info": lambda *_: json_answer(server_info.server_info(config.card, board)),
            "/get_server_info": lambda *_: json_answer(server_info.server_info(config.card, board)),
            "/metrics": lambda *_: Answer(200, self._metrics.render(), CONTENT_TYPE),
            "/openapi.json": lambda *_: Answer(
                200,
                openapi(config.card, config.follows_grammars, config.trust_request_chat_template),
            ),
            "/docs": lambda *_: Answer(200, docs_page(config.card), HTML),
        }

    def handle(self, request: HttpRequest, body: Body) -> Stages:
        """Answer a request.

        Raises:
            RequestError: it is refused.
        """
        if (handler := self.find(request.path)) is None:
            if request.path in SERVED[POST]:
                raise MethodNotAllowed(request.method, request.path, POST)
            raise RouteNotFound(request.path)
        if request.method not in (GET, HEAD):
            raise MethodNotAllowed(request.method, request.path, GET)
        found = handler(request, body)
        return found if isinstance(found, Answer) else (yield from found)

    def find(self, path: str) -> Handler | None:
        """Return what answers at a path, or None."""
        return self._model if path.startswith(f"{PATH}/") else self.handlers.get(path)

    def _model(self, request: HttpRequest, _body: Body) -> Answer:
        if request.path not in self._models:
            raise ModelNotFound(request.path.removeprefix(f"{PATH}/"), self._card.name)
        return Answer(200, self._models[request.path])
