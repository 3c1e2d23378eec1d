"""What each path does. Early answers are made here; generation goes on to the engine."""

from headrace import __version__
from headrace.board import Board
from headrace.config import TokenizerConfig
from headrace.errors import MethodNotAllowed, ModelNotFound, RouteNotFound
from headrace.messages import HttpRequest
from headrace.metrics import CONTENT_TYPE, render_metrics
from headrace.tokenizer_proc import about
from headrace.tokenizer_proc.docs_page import CONTENT_TYPE as HTML
from headrace.tokenizer_proc.docs_page import docs_page
from headrace.tokenizer_proc.embedding_planner import EmbeddingPlanner
from headrace.tokenizer_proc.generation import GenerationPlanner
from headrace.tokenizer_proc.openapi import openapi
from headrace.tokenizer_proc.stages import Answer, Body, Handler, Stages, json_answer
from headrace.tokenizer_proc.tokens import TokenRoutes


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
        self._card = config.card
        self._dialect = config.metrics_dialect
        self._model = {
            "id": config.card.name,
            "object": "model",
            "created": config.started_at,
            "owned_by": "headrace",
            "root": config.card.path,
            "max_model_len": config.card.max_model_len,
        }
        self._board = board
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
            "/v1/models": {"GET": self._models},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/model_info": {"GET": self._model_info},
            "/get_model_info": {"GET": self._model_info},
            "/server_info": {"GET": self._server_info},
            "/get_server_info": {"GET": self._server_info},
            "/metrics": {"GET": self._metrics},
            "/openapi.json": {"GET": self._openapi},
            "/docs": {"GET": self._docs},
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
        if methods is None and request.path.startswith("/v1/models/"):
            methods = {"GET": self._one_model}
        if methods is None:
            raise RouteNotFound(request.path)
        if request.method not in methods:
            raise MethodNotAllowed(request.method, request.path, ", ".join(methods))
        return methods[request.method]

    def _models(self, _request: HttpRequest, _body: Body) -> Answer:
        return json_answer({"object": "list", "data": [self._model]})

    def _one_model(self, request: HttpRequest, _body: Body) -> Answer:
        name = request.path.removeprefix("/v1/models/")
        if name != self._card.name:
            raise ModelNotFound(name, self._card.name)
        return json_answer(self._model)

    def _version(self, _request: HttpRequest, _body: Body) -> Answer:
        return json_answer({"version": __version__})

    def _load(self, _request: HttpRequest, _body: Body) -> Answer:
        return json_answer(about.load(self._board))

    def _model_info(self, _request: HttpRequest, _body: Body) -> Answer:
        return json_answer(about.model_info(self._card))

    def _server_info(self, _request: HttpRequest, _body: Body) -> Answer:
        return json_answer(about.server_info(self._card, self._board))

    def _openapi(self, _request: HttpRequest, _body: Body) -> Answer:
        return Answer(200, openapi(self._card.name))

    def _docs(self, _request: HttpRequest, _body: Body) -> Answer:
        return Answer(200, docs_page(self._card.name), HTML)

    def _metrics(self, _request: HttpRequest, _body: Body) -> Answer:
        return Answer(200, render_metrics(self._board, self._card, self._dialect), CONTENT_TYPE)
