"""The HTTP routes: one table for routing, counts, `/openapi.json` and the client.

A path that is not here is answered with 404, but for `/admin` (`frontend/admin.py`) and what is
below `/v1/models`. Files of the page at `/` are in `frontend/http/static_files.py`. `/mock`, with a
mock engine, is in `tokenizer_proc/scripts/scripted_routes.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import NamedTuple, TypeVar

T = TypeVar("T")
GET, HEAD, POST = "GET", "HEAD", "POST"
PUT, DELETE = "PUT", "DELETE"
READS = (GET, HEAD)  # need no tokenizer

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
GENERATE = "/generate"
RERANK, SCORE = "/v1/rerank", "/v1/score"
COHERE_EMBED, COHERE_EMBED_V1, COHERE_RERANK = "/v2/embed", "/v1/embed", "/v2/rerank"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
KV_WARM = "/v1/kv/warm"
MODELS = "/v1/models"
LOAD_LORA, UNLOAD_LORA = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RESET_MM_CACHE, RESET_ENCODER_CACHE = "/reset_mm_cache", "/reset_encoder_cache"  # vLLM's
VERSION, LOAD = "/version", "/load"
MODEL_INFO, SERVER_INFO = "/model_info", "/server_info"
HEALTH, READY, STARTUP, PING = "/health", "/ready", "/startup", "/ping"
MOCK_SCRIPT, MOCK_REQUESTS = "/mock/script", "/mock/requests"
METRICS, OPENAPI, DOCS, UI = "/metrics", "/openapi.json", "/docs", "/"
METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"  # its content type
RING, RING_EVENTS = "/ring", "/ring/events"

ANTHROPIC_PATHS = MESSAGES  # and what is below it: errors have Anthropic's shape there
COHERE_PATHS = frozenset({COHERE_EMBED, COHERE_EMBED_V1, COHERE_RERANK})  # and Cohere's here
JINA_PATHS = frozenset({EMBEDDINGS, RERANK, "/rerank"})  # and OpenAI's here, with Jina's field


class Lane(Enum):
    """The process that answers a route."""

    FRONTEND = "frontend"  # at once, when nothing else answers
    FILE = "file"  # the frontend, with a file that needs no API key (`static_files.py`)
    INFO = "info"  # the tokenizer process for GETs, which loads no tokenizer
    TOKENIZER = "tokenizer"


class Need(Enum):
    """A capability that a route requires of the model."""

    NOTHING = "nothing"
    GENERATION = "generation"
    CHAT_TEMPLATE = "chat template"
    EMBEDDINGS = "embeddings"
    SCORES = "scores"  # by embeddings or a cross-encoder
    ADAPTERS = "adapters"


class Route(NamedTuple):
    """A path with its method and other names."""

    path: str
    summary: str
    lane: Lane = Lane.TOKENIZER
    need: Need = Need.NOTHING
    aliases: tuple[str, ...] = ()  # further paths, not described
    is_counted: bool = True  # in HTTP metrics, a row for each path

    @property
    def method(self) -> str:
        """POST where a body is tokenized, else GET. HEAD is answered as GET."""
        return POST if self.lane is Lane.TOKENIZER else GET

    @property
    def paths(self) -> tuple[str, ...]:
        """The path and its aliases."""
        return (self.path, *self.aliases)


ROUTES = (
    Route(CHAT, "Answer a conversation", need=Need.CHAT_TEMPLATE),
    Route(COMPLETIONS, "Continue texts", need=Need.GENERATION),
    Route(RESPONSES, "Respond to an input", need=Need.CHAT_TEMPLATE),
    Route(INPUT_TOKENS, "Count an input's tokens", need=Need.CHAT_TEMPLATE),
    Route(MESSAGES, "Answer, as Anthropic does", need=Need.CHAT_TEMPLATE),
    Route(COUNT_TOKENS, "Count an input's tokens", need=Need.CHAT_TEMPLATE),
    Route(GENERATE, "Continue texts, as SGLang does", need=Need.GENERATION),
    Route(EMBEDDINGS, "Embed texts", need=Need.EMBEDDINGS),
    Route(RERANK, "Order texts by a query", need=Need.SCORES, aliases=("/rerank",)),
    Route(COHERE_EMBED, "Embed texts, as Cohere does", need=Need.EMBEDDINGS),
    Route(COHERE_EMBED_V1, "Embed texts, as Cohere's first API does", need=Need.EMBEDDINGS),
    Route(COHERE_RERANK, "Order texts by a query, as Cohere does", need=Need.SCORES),
    Route(SCORE, "Compare texts", need=Need.SCORES, aliases=("/score",)),
    Route(TOKENIZE, "Turn a text into token ids"),
    Route(DETOKENIZE, "Turn token ids into a text"),
    Route(KV_WARM, "Compute prompts ahead", need=Need.GENERATION),
    Route(LOAD_LORA, "Load an adapter", need=Need.ADAPTERS, aliases=("/load_lora_adapter",)),
    Route(UNLOAD_LORA, "Unload an adapter", need=Need.ADAPTERS, aliases=("/unload_lora_adapter",)),
    Route(MODELS, "List the model that is served", Lane.INFO),
    # As with vLLM, what monitors ask for is not counted.
    Route(VERSION, "Return the server's version", Lane.INFO, is_counted=False),
    Route(LOAD, "Return the number of open requests", Lane.INFO, is_counted=False),
    Route(
        MODEL_INFO, "Describe the model", Lane.INFO, aliases=("/get_model_info",), is_counted=False
    ),
    Route(
        SERVER_INFO,
        "Describe the server",
        Lane.INFO,
        aliases=("/get_server_info",),
        is_counted=False,
    ),
    Route(
        HEALTH, "Check that all processes serve", Lane.FRONTEND, aliases=(PING,), is_counted=False
    ),
    Route(READY, "Check that requests are accepted", Lane.FRONTEND, is_counted=False),
    Route(STARTUP, "Check that all processes have started", Lane.FRONTEND, is_counted=False),
    Route(METRICS, "Return metrics, for Prometheus", Lane.INFO, is_counted=False),
    Route(RING, "Return the state of each process", Lane.INFO, is_counted=False),
    Route(RING_EVENTS, "Stream the state of each process", Lane.INFO, is_counted=False),
    Route(OPENAPI, "Return this description", Lane.INFO),
    Route(DOCS, "Show this description as a page", Lane.FILE, is_counted=False),
)


def routes_of(lane: Lane) -> Iterator[Route]:
    """Yield the routes that a lane answers."""
    return (route for route in ROUTES if route.lane is lane)


def by_path(handlers: Mapping[str, T], routes: Iterable[Route]) -> dict[str, T]:
    """Return handlers by every path of their routes, aliases among them.

    Args:
        handlers: by the path of each route.
    """
    return {path: handlers[route.path] for route in routes for path in route.paths}
