"""Information routes: paths that take GET and need no tokenizer.

What renders `/metrics` and `/openapi.json` is imported when first asked for. Every tokenizer
process has these routes, and the imports took 60 ms of processor time at its start.
"""

from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import unquote

from headrace import __version__, routes
from headrace.board.board import Board
from headrace.board.model_status import model_status
from headrace.config.model_list import adapter_model_of, model_list, model_of, status_of
from headrace.config.process_configs import TokenizerConfig
from headrace.errors import MethodNotAllowed, ModelNotFound, RouteNotFound
from headrace.ipc.adapter_registry import AdapterRegistry
from headrace.ipc.messages import AdapterSource, HttpRequest
from headrace.response_bodies.server import ServedModel, VersionResponse
from headrace.routes import GET, HEAD, MODELS, POST, Lane, by_path, routes_of
from headrace.tokenizer_proc.jobs.stages import (
    Body,
    Handler,
    ImmediateResponse,
    Stages,
    json_response,
)
from headrace.tokenizer_proc.openapi import server_info
from headrace.tokenizer_proc.ring.monitor import CONTENT_TYPE as EVENTS
from headrace.tokenizer_proc.ring.monitor import RingMonitor

if TYPE_CHECKING:
    from headrace.metrics.headrace_metrics import MetricsPage


class InfoRoutes:
    """The paths that take GET, but for `/health` and its kin. HEAD is answered as GET is.

    Attributes:
        monitor: of the ring.
    """

    def __init__(self, config: TokenizerConfig, board: Board) -> None:
        self._config = config
        self._cards, first = config.cards, config.cards[0]
        self._board = board
        self._adapters = registry_of(config)
        self.monitor = RingMonitor(board, config)
        handlers: dict[str, Handler] = {
            routes.MODELS: self._model,
            routes.VERSION: lambda *_: json_response(VersionResponse(version=__version__)),
            routes.LOAD: lambda *_: json_response(server_info.load(board)),
            routes.MODEL_INFO: lambda *_: json_response(server_info.model_info(first)),
            routes.SERVER_INFO: lambda *_: json_response(server_info.server_info(first, board)),
            routes.METRICS: lambda *_: ImmediateResponse(
                200, self.metrics.render(), routes.METRICS_TYPE
            ),
            routes.RING: lambda *_: json_response(self.monitor.state()),
            routes.RING_EVENTS: lambda *_: ImmediateResponse(
                200, self.monitor.opening(), EVENTS, is_open=True
            ),
            routes.OPENAPI: self._openapi,
        }
        self.handlers = by_path(handlers, routes_of(Lane.INFO))
        if config.takes_scripts:
            from headrace.tokenizer_proc.scripts.scripted_routes import ScriptedRoutes

            scripted = ScriptedRoutes(config.run_dir, first.eos_token_ids)
            for path, methods in scripted.handlers.items():
                self.handlers[path] = methods[GET]
        self._posted = {path for route in routes_of(Lane.TOKENIZER) for path in route.paths}

    def handle(self, request: HttpRequest, body: Body) -> Stages:
        """Answer a request.

        Raises:
            RequestError: it is refused.
        """
        if (handler := self.find(request.path)) is None:
            if request.path in self._posted:
                raise MethodNotAllowed(request.method, request.path, POST)
            raise RouteNotFound(request.path)
        if request.method not in (GET, HEAD):
            raise MethodNotAllowed(request.method, request.path, GET)
        found = handler(request, body)
        return found if isinstance(found, ImmediateResponse) else (yield from found)

    def find(self, path: str) -> Handler | None:
        """Return what answers at a path, or None."""
        return self._model if path.startswith(f"{MODELS}/") else self.handlers.get(path)

    @cached_property
    def metrics(self) -> "MetricsPage":
        """What renders `/metrics`."""
        from headrace.metrics.headrace_metrics import MetricsPage

        dialect = self._config.metrics_dialect
        return MetricsPage(self._board, self._cards, dialect, self._adapters)

    def _openapi(self, _request: HttpRequest, _body: Body) -> ImmediateResponse:
        from headrace.tokenizer_proc.openapi.openapi import openapi

        config = self._config
        return ImmediateResponse(
            200, openapi(config.cards, config.follows_grammars, config.trust_request_chat_template)
        )

    def _model(self, request: HttpRequest, _body: Body) -> ImmediateResponse:
        """Return the model, one of the adapters, or the list of both."""
        name = unquote(request.path.removeprefix(f"{MODELS}/"))
        served = self._served
        if request.path == MODELS:
            adapters = [self._adapter_model(adapter) for adapter in self._adapters or ()]
            return json_response(model_list(served, adapters))
        for model in served:
            if model.id == name:
                return json_response(model)
        adapter = None if self._adapters is None else self._adapters.find(name)
        if adapter is None:
            raise ModelNotFound(name, *(card.name for card in self._cards))
        return json_response(self._adapter_model(adapter))

    @property
    def _served(self) -> list[ServedModel]:
        """The models, with whether they are loaded where they come and go."""
        served = [model_of(card, self._config.started_at) for card in self._cards]
        if self._config.tells_loads:
            for place, model in enumerate(served):
                model.status = status_of(model_status(self._board, place))
        return served

    def _adapter_model(self, adapter: AdapterSource) -> ServedModel:
        started_at = self._config.started_at
        return adapter_model_of(self._cards[0], started_at, adapter.name, adapter.path)


def registry_of(config: TokenizerConfig) -> AdapterRegistry | None:
    """Return the adapters of a server, with `--enable-lora`."""
    return AdapterRegistry(config.run_dir, config.lora_dir) if config.enable_lora else None
