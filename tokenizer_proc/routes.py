"""Routing of paths to handlers. Early answers are made here; generation goes to the engine."""

from headrace.board.board import Board
from headrace.board.http_counts import GET, HEAD
from headrace.config.config import TokenizerConfig
from headrace.errors import MethodNotAllowed, RouteNotFound
from headrace.ipc.messages import HttpRequest
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
        self.handlers: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": generation.chat},
            "/v1/completions": {"POST": generation.completion},
            "/v1/responses": {"POST": generation.responses},
            "/v1/responses/input_tokens": {"POST": generation.input_tokens},
            "/v1/messages": {"POST": generation.messages},
            "/v1/messages/count_tokens": {"POST": generation.count_tokens},
            "/generate": {"POST": generation.generate},
            "/v1/embeddings": {"POST": embedding.embedding},
            "/v1/rerank": {"POST": embedding.rerank},
            "/v2/rerank": {"POST": embedding.rerank},
            "/rerank": {"POST": embedding.rerank},
            "/v1/score": {"POST": embedding.score},
            "/score": {"POST": embedding.score},
            "/tokenize": {"POST": tokens.tokenize},
            "/detokenize": {"POST": tokens.detokenize},
            **{path: {GET: handler} for path, handler in about.handlers.items()},
        }

    def handle(self, request: HttpRequest, body: Body) -> Stages:
        """Answer a request, or say what the engine is to do for it.

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
