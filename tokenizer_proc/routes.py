"""Routing of paths to handlers. Early answers are made here; generation goes to the engine."""

from headrace.board.board import Board
from headrace.config.config import TokenizerConfig
from headrace.errors import MethodNotAllowed, RouteNotFound
from headrace.ipc.messages import HttpRequest
from headrace.routes import GET, HEAD, POST, Lane, by_path, routes_of
from headrace.tokenizer_proc.embedding_planner import EmbeddingPlanner
from headrace.tokenizer_proc.generation import GenerationPlanner
from headrace.tokenizer_proc.info_routes import InfoRoutes
from headrace.tokenizer_proc.jobs.stages import Answer, Body, Handler, Stages
from headrace.tokenizer_proc.tokenize_routes import TokenRoutes


class Routes:
    """The HTTP surface, but for `/health` and `/ready`."""

    def __init__(
        self,
        config: TokenizerConfig,
        board: Board,
        generation: GenerationPlanner,
        embedding: EmbeddingPlanner,
        tokens: TokenRoutes,
    ) -> None:
        self._about = about = InfoRoutes(config, board)
        handlers = generation.handlers | embedding.handlers | tokens.handlers
        posted = by_path(handlers, routes_of(Lane.TOKENIZER))
        self.handlers: dict[str, dict[str, Handler]] = {
            **{path: {POST: handler} for path, handler in posted.items()},
            **{path: {GET: handler} for path, handler in about.handlers.items()},
        }

    def handle(self, request: HttpRequest, body: Body) -> Stages:
        """Answer a request, or return the sequences for the engine.

        Raises:
            RequestError: it is refused.
        """
        found = self._find(request)(request, body)
        return found if isinstance(found, Answer) else (yield from found)

    def _find(self, request: HttpRequest) -> Handler:
        methods = self.handlers.get(request.path)
        if methods is None and (handler := self._about.find(request.path)):
            methods = {GET: handler}
        if methods is None:
            raise RouteNotFound(request.path)
        method = GET if request.method == HEAD else request.method
        if method not in methods:
            raise MethodNotAllowed(request.method, request.path, ", ".join(methods))
        return methods[method]
