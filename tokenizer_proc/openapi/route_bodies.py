"""Bodies of each route: the structs that it takes and answers, and examples of requests.

Each example gets a 200. The pages that send them are `/docs` and the page at `/`. They name no
model, since there is one. Tests send all of them.
"""

from typing import Any, NamedTuple

import msgspec

from headrace import routes
from headrace.response_bodies import (
    openai_completions,
    openai_responses,
    server,
    sglang_generate,
    tokens,
)
from headrace.response_bodies.anthropic_messages import MessageEvent, MessagesResponse
from headrace.response_bodies.cohere import CohereEmbedded, CohereFloats, CohereRanking
from headrace.response_bodies.embeddings import Embedded
from headrace.response_bodies.scores import RerankResponse, ScoreResponse
from headrace.tokenizer_proc.requests.adapters import LoadLora, UnloadLora
from headrace.tokenizer_proc.requests.anthropic import CountRequest, MessagesRequest
from headrace.tokenizer_proc.requests.cohere import CohereEmbedRequest, CohereRerankRequest
from headrace.tokenizer_proc.requests.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from headrace.tokenizer_proc.requests.rerank import RerankRequest, ScoreRequest
from headrace.tokenizer_proc.requests.responses import ResponsesRequest
from headrace.tokenizer_proc.requests.sglang import GenerateBody
from headrace.tokenizer_proc.ring.monitor import RingEvent
from headrace.tokenizer_proc.ring.ring_state import RingState

Examples = dict[str, dict[str, Any]]  # bodies by title

JSON = "application/json"


class BodyTypes(NamedTuple):
    """The types of what a route takes and answers."""

    request: type[msgspec.Struct] | None
    response: Any  # None is JSON of any form
    events: Any = None  # of a stream, where the route can stream


BODIES = {
    routes.CHAT: BodyTypes(
        ChatRequest,
        openai_completions.ChatCompletionResponse,
        openai_completions.ChatCompletionStreamResponse,
    ),
    routes.COMPLETIONS: BodyTypes(
        CompletionRequest,
        openai_completions.CompletionResponse,
        openai_completions.CompletionStreamResponse,
    ),
    routes.RESPONSES: BodyTypes(
        ResponsesRequest, openai_responses.Response, openai_responses.ResponseEvent
    ),
    routes.INPUT_TOKENS: BodyTypes(ResponsesRequest, tokens.InputTokens),
    routes.MESSAGES: BodyTypes(MessagesRequest, MessagesResponse, MessageEvent),
    routes.COUNT_TOKENS: BodyTypes(CountRequest, tokens.TokenCount),
    routes.GENERATE: BodyTypes(
        GenerateBody, sglang_generate.Generated, sglang_generate.GenerateEvent
    ),
    routes.EMBEDDINGS: BodyTypes(EmbeddingRequest, Embedded),
    routes.RERANK: BodyTypes(RerankRequest, RerankResponse),
    routes.COHERE_EMBED: BodyTypes(CohereEmbedRequest, CohereEmbedded),
    routes.COHERE_EMBED_V1: BodyTypes(CohereEmbedRequest, CohereFloats | CohereEmbedded),
    routes.COHERE_RERANK: BodyTypes(CohereRerankRequest, CohereRanking),
    routes.SCORE: BodyTypes(ScoreRequest, ScoreResponse),
    routes.TOKENIZE: BodyTypes(TokenizeRequest, tokens.TokenizeResponse),
    routes.DETOKENIZE: BodyTypes(DetokenizeRequest, tokens.DetokenizeResponse),
    routes.KV_WARM: BodyTypes(CompletionRequest, None),  # or a chat's
    routes.LOAD_LORA: BodyTypes(LoadLora, None),
    routes.UNLOAD_LORA: BodyTypes(UnloadLora, None),
    routes.MODELS: BodyTypes(None, server.ModelListResponse),
    routes.VERSION: BodyTypes(None, server.VersionResponse),
    routes.LOAD: BodyTypes(None, server.ServerLoad),
    routes.MODEL_INFO: BodyTypes(None, server.ModelInfo),
    routes.SERVER_INFO: BodyTypes(None, server.ServerInfo),
    routes.HEALTH: BodyTypes(None, server.Health),
    routes.READY: BodyTypes(None, server.Health),
    routes.STARTUP: BodyTypes(None, server.Health),
    routes.METRICS: BodyTypes(None, None),
    routes.RING: BodyTypes(None, RingState),
    routes.RING_EVENTS: BodyTypes(None, None, RingEvent),
    routes.OPENAPI: BodyTypes(None, None),
    routes.DOCS: BodyTypes(None, None),
}
CONTENT_TYPES = {  # of others JSON
    routes.METRICS: "text/plain",
    routes.RING_EVENTS: "text/event-stream",
    routes.LOAD_LORA: "text/plain",
    routes.UNLOAD_LORA: "text/plain",
    routes.DOCS: "text/html",
}

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
RIVER = ["The river rises.", "The water is high."]
RANKED = {
    "query": "Where does the river rise?",
    "documents": ["It rises in the hills.", "Bread is baked in ovens."],
}
LIMIT = 64  # tokens of an answer
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CAPITAL = {
    "type": "object",
    "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "capital", "schema": CAPITAL}}
SCHEMA, TOOL = "JSON that follows a schema", "A tool call"
EXAMPLES: dict[str, Examples] = {
    routes.CHAT: {
        "A question": {"messages": QUESTION, "max_tokens": LIMIT},
        "A stream": {"messages": QUESTION, "max_tokens": LIMIT, "stream": True},
        "A sampled story": {
            "messages": [
                {"role": "system", "content": "You tell stories of three sentences."},
                {"role": "user", "content": "Tell a story about a river."},
            ],
            "temperature": 0.8,
            "top_p": 0.9,
            "seed": 7,
            "max_tokens": 2 * LIMIT,
        },
        SCHEMA: {"messages": QUESTION, "response_format": FORMAT, "max_tokens": LIMIT},
        TOOL: {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [WEATHER],
            "tool_choice": "required",
            "max_tokens": LIMIT,
        },
    },
    routes.COMPLETIONS: {
        "A text": {"prompt": "The capital of France is", "max_tokens": 8},
        "Two texts with probabilities": {
            "prompt": ["The capital of France is", "The capital of Italy is"],
            "max_tokens": 8,
            "logprobs": 2,
        },
    },
    routes.RESPONSES: {
        "A question": {"input": "What is the capital of France?", "max_output_tokens": LIMIT},
        "A stream": {
            "input": "What is the capital of France?",
            "max_output_tokens": LIMIT,
            "stream": True,
        },
    },
    routes.INPUT_TOKENS: {"A question": {"input": "What is the capital of France?"}},
    routes.MESSAGES: {
        "A question": {"messages": QUESTION, "max_tokens": LIMIT},
        "A stream": {"messages": QUESTION, "max_tokens": LIMIT, "stream": True},
    },
    routes.COUNT_TOKENS: {"A question": {"messages": QUESTION}},
    routes.GENERATE: {
        "A text": {
            "text": "The capital of France is",
            "sampling_params": {"max_new_tokens": 8, "temperature": 0},
        }
    },
    routes.EMBEDDINGS: {"Two texts": {"input": RIVER}},
    routes.RERANK: {"Two texts": RANKED},
    routes.COHERE_EMBED: {
        "Two texts": {"texts": RIVER, "input_type": "search_document", "embedding_types": ["int8"]}
    },
    routes.COHERE_EMBED_V1: {"Two texts": {"texts": RIVER}},
    routes.COHERE_RERANK: {"Two texts": RANKED},
    routes.SCORE: {
        "Two texts": {"text_1": "The river rises.", "text_2": ["The water is high.", "It snows."]}
    },
    routes.TOKENIZE: {"A text": {"prompt": "The capital of France is"}},
    routes.DETOKENIZE: {"Three tokens": {"tokens": [1, 2, 3]}},
}


def examples_of(path: str, offers_tools: bool, follows_grammars: bool) -> Examples:
    """Return the examples of a route that this server can answer."""
    absent = set[str]()
    if not follows_grammars:
        absent |= {SCHEMA, TOOL}
    if not offers_tools:
        absent.add(TOOL)
    found = EXAMPLES.get(path, {})
    return {title: body for title, body in found.items() if title not in absent}
