"""What each path does. Early answers are made here; generation goes on to the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace import __version__
from headrace.board import Board
from headrace.config import TokenizerConfig
from headrace.errors import MethodNotAllowed, ModelNotFound, RequestError, RouteNotFound
from headrace.messages import HttpRequest
from headrace.metrics import CONTENT_TYPE, render_metrics
from headrace.tokenizer_proc.generation import GenerationPlanner, Sequences

Body = bytes | memoryview
Handler = Callable[[HttpRequest, Body], "Answer | Sequences"]


@dataclass(frozen=True)
class Answer:
    """A whole response."""

    status: int
    body: bytes
    content_type: str = "application/json"


def error_answer(error: RequestError) -> Answer:
    """Return an error in OpenAI's shape."""
    return Answer(error.status, msgspec.json.encode(error.body()))


class Routes:
    """The HTTP surface, but for `/health`."""

    def __init__(self, config: TokenizerConfig, board: Board, planner: GenerationPlanner) -> None:
        self._card = config.card
        self._model = {
            "id": config.card.name,
            "object": "model",
            "created": config.started_at,
            "owned_by": "headrace",
            "root": config.card.path,
            "max_model_len": config.card.max_model_len,
        }
        self._board = board
        self._handlers: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": planner.chat},
            "/v1/completions": {"POST": planner.completion},
            "/v1/embeddings": {"POST": planner.embedding},
            "/v1/models": {"GET": self._models},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
        }

    def handle(self, request: HttpRequest, body: Body) -> Answer | Sequences:
        """Answer a request, or say what the engine is to do for it."""
        try:
            return self._find(request)(request, body)
        except RequestError as error:
            return error_answer(error)

    def _find(self, request: HttpRequest) -> Handler:
        methods = self._handlers.get(request.path)
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

    def _metrics(self, _request: HttpRequest, _body: Body) -> Answer:
        return Answer(200, render_metrics(self._board, self._card.name), CONTENT_TYPE)


def json_answer(value: Any) -> Answer:
    """Return `value` as a JSON response."""
    return Answer(200, msgspec.json.encode(value))
