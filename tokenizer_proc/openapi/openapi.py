"""`/openapi.json`: what this server takes and answers, from the structs that decode it.

https://spec.openapis.org/oas/v3.1.0
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import msgspec

from headrace import __version__
from headrace.client import responses
from headrace.config.config import ModelCard
from headrace.errors import ANTHROPIC_PATHS
from headrace.tokenizer_proc.apis.anthropic import CountRequest, MessagesRequest
from headrace.tokenizer_proc.apis.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from headrace.tokenizer_proc.apis.rerank import RerankRequest, ScoreRequest
from headrace.tokenizer_proc.apis.responses import ResponsesRequest
from headrace.tokenizer_proc.apis.sampling import OWN_RANGES, RANGES
from headrace.tokenizer_proc.apis.sglang import GenerateBody
from headrace.tokenizer_proc.openapi import event_schemas, response_schemas
from headrace.tokenizer_proc.openapi.schema_needs import add_needs
from headrace.tokenizer_proc.openapi.schema_shapes import add_shapes

Object = dict[str, Any]

REFERENCE = "#/components/schemas/{name}"
JSON = "application/json"
NUMBERS = ("integer", "number")
SECURITY = {
    "key": {"type": "http", "scheme": "bearer"},
    "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
TOKEN_ID = {"type": "integer", "minimum": 0}
# One text or several, each of them characters or token ids. msgspec has no such union.
TEXT_OR_IDS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": TOKEN_ID},
        {"type": "array", "items": {"type": "array", "items": TOKEN_ID}},
    ]
}
TEXT_OR_IDS_FIELDS = {CompletionRequest: "prompt", EmbeddingRequest: "input"}


class ErrorBody(msgspec.Struct):
    """Why a request is refused."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """The body of every error."""

    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct):
    """Why a request is refused, in Anthropic's words."""

    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """The body of every error of Anthropic's API."""

    type: str
    error: AnthropicErrorBody


class Operation(msgspec.Struct):
    """A path of the API."""

    path: str
    method: str
    summary: str
    request: type[msgspec.Struct] | None = None
    response: Any = None  # the type of the answer; None is JSON of any form
    content_type: str = JSON
    events: Any = None  # the type of a stream's events, where it can stream


OPERATIONS = [
    Operation(
        responses.CHAT,
        "post",
        "Answer a conversation",
        ChatRequest,
        responses.ChatCompletion,
        events=event_schemas.ChatEvent,
    ),
    Operation(
        responses.COMPLETIONS,
        "post",
        "Continue texts",
        CompletionRequest,
        responses.Completion,
        events=event_schemas.TextEvent,
    ),
    Operation(
        "/v1/responses",
        "post",
        "Respond to an input",
        ResponsesRequest,
        response_schemas.Response,
        events=event_schemas.ResponseEvent,
    ),
    Operation(
        "/v1/responses/input_tokens",
        "post",
        "Count an input's tokens",
        ResponsesRequest,
        response_schemas.InputTokens,
    ),
    Operation(
        "/v1/messages",
        "post",
        "Answer, as Anthropic does",
        MessagesRequest,
        response_schemas.AnsweredMessage,
        events=event_schemas.MessageEvent,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "post",
        "Count an input's tokens",
        CountRequest,
        response_schemas.TokenCount,
    ),
    Operation(
        "/generate",
        "post",
        "Continue texts, as SGLang does",
        GenerateBody,
        response_schemas.Generated,
        events=event_schemas.GenerateEvent,
    ),
    Operation(
        responses.EMBEDDINGS, "post", "Embed texts", EmbeddingRequest, response_schemas.Embedded
    ),
    Operation("/v1/rerank", "post", "Order texts by a query", RerankRequest, responses.Ranking),
    Operation("/v1/score", "post", "Compare texts", ScoreRequest, responses.ScoreList),
    Operation("/tokenize", "post", "Turn a text into token ids", TokenizeRequest, responses.Tokens),
    Operation(
        "/detokenize",
        "post",
        "Turn token ids into a text",
        DetokenizeRequest,
        responses.Detokenized,
    ),
    Operation("/v1/models", "get", "List the model that is served", None, responses.ModelList),
    Operation("/version", "get", "Tell the server's version", None, responses.Version),
    Operation("/load", "get", "Tell how many requests are open", None, response_schemas.ServerLoad),
    Operation("/model_info", "get", "Tell of the model", None, response_schemas.ModelInfo),
    Operation("/server_info", "get", "Tell of the server", None, response_schemas.ServerInfo),
    Operation("/health", "get", "Tell whether all processes serve", None, response_schemas.Health),
    Operation("/ready", "get", "Tell whether requests are let in", None, response_schemas.Health),
    Operation("/startup", "get", "Tell whether all have begun", None, response_schemas.Health),
    Operation("/metrics", "get", "Tell metrics, for Prometheus", content_type="text/plain"),
    Operation("/openapi.json", "get", "Tell this description"),
    Operation("/docs", "get", "Show this description as a page", content_type="text/html"),
]

# By what they need of a model: that it generates, that it has a chat template, that it embeds.
GENERATE = {responses.COMPLETIONS, "/generate"}
CONVERSE = {
    *(responses.CHAT, "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/messages", "/v1/messages/count_tokens"),
}
COMPARE = {"/v1/rerank", "/v1/score"}


def openapi(
    card: ModelCard, follows_grammars: bool = True, trusts_templates: bool = False
) -> bytes:
    """Return the description, JSON, of a server of one model."""
    paths: Object = {}
    for operation in operations_of(card):
        paths.setdefault(operation.path, {})[operation.method] = described(operation)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Headrace", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": schemas(card, follows_grammars, trusts_templates),
                "securitySchemes": SECURITY,
            },
            "security": [{}, *({name: []} for name in SECURITY)],
        }
    )


def operations_of(card: ModelCard) -> list[Operation]:
    """Return the operations that a model is served by."""
    gone: set[str] = set()
    if card.embeds or card.compares:
        gone |= GENERATE
    if card.chat_template is None or card.embeds or card.compares:
        gone |= CONVERSE
    if not (card.embeds or card.compares):
        gone |= {*COMPARE, responses.EMBEDDINGS}
    if card.compares:
        gone |= {responses.EMBEDDINGS}
    return [operation for operation in OPERATIONS if operation.path not in gone]


def schemas(
    card: ModelCard, follows_grammars: bool = True, trusts_templates: bool = False
) -> Object:
    """Return the schema of every struct by name, without what vLLM and SGLang alone have."""
    kinds = [
        kind
        for o in operations_of(card)
        for kind in (o.request, o.response, o.events)
        if kind is not None
    ]
    _, components = msgspec.json.schema_components(
        [*map(plain, kinds), Error, AnthropicError], ref_template=REFERENCE
    )
    for kind, name in TEXT_OR_IDS_FIELDS.items():
        if kind.__name__ not in components:
            continue
        components[kind.__name__]["properties"][name] = deepcopy(TEXT_OR_IDS)
    for kind_name, schema in components.items():
        ranges = RANGES | OWN_RANGES.get(kind_name, {})
        fields = schema.get("properties", {})
        for name, field in fields.items():
            limit(field, *ranges.get(name, (None, None)))
            if name == "model":
                field["examples"] = [card.name]
    if not trusts_templates:
        for schema in components.values():
            schema.get("properties", {}).pop("chat_template", None)
    add_shapes(components)
    add_needs(components, card.vocab_size, follows_grammars, card.tool_format is not None)
    return components


def plain(kind: Any) -> Any:
    """Return a type that msgspec can describe."""
    name = TEXT_OR_IDS_FIELDS.get(kind)
    if name is None:
        return kind
    return msgspec.defstruct(kind.__name__, [(name, str)], bases=(kind,), kw_only=True)


def limit(field: Object, low: float | None, high: float | None) -> None:
    """Add a range to the numbers that a field may be, or have a list of."""
    for given in field.get("anyOf", [field]):
        form = given.get("items", given)
        if form.get("type") in NUMBERS:
            form |= {
                name: bound
                for name, bound in (("minimum", low), ("maximum", high))
                if bound is not None
            }


def described(operation: Operation) -> Object:
    """Return what there is to say of one operation."""
    answer = {"schema": {} if operation.response is None else reference(operation.response)}
    content = {operation.content_type: answer}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": event_schema(operation)}
    found: Object = {
        "operationId": operation.path.strip("/").replace("/", "_").removesuffix(".json"),
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer", "content": content}}
        | dict(errors(operation)),
    }
    if operation.request is not None:
        body = {JSON: {"schema": reference(operation.request)}}
        found["requestBody"] = {"required": True, "content": body}
    return found


def event_schema(operation: Operation) -> Object:
    """Return the schema of each event of a stream, as an object of its fields."""
    data: Object = {"type": "string", "contentMediaType": JSON}
    schema = reference(operation.events)
    if "discriminator" in schema:  # an event of theirs tells of failures
        data["contentSchema"] = schema
    else:
        data["contentSchema"] = {"anyOf": [schema, reference(Error)]}
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    properties = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "properties": properties, "required": ["data"]}


def errors(operation: Operation) -> Iterator[tuple[str, Object]]:
    """Yield the errors an operation may end in, by status."""
    if operation.response is response_schemas.Health:  # which needs no key, and says why
        health = {JSON: {"schema": reference(operation.response)}}
        yield "503", {"description": "It is not so, and why", "content": health}
        return
    statuses = {"401": "No valid API key"}
    if operation.request is not None:
        statuses |= {
            "400": "The request is not valid; the text names the field",
            "404": "There is no such model",
            "413": "The body is too large",
            "415": "The body's type is not application/json",
            "429": "There is too much to do; see Retry-After",
            "503": "The server is not ready",
        }
    kind = AnthropicError if operation.path.startswith(ANTHROPIC_PATHS) else Error
    for status, why in statuses.items():
        yield status, {"description": why, "content": {JSON: {"schema": reference(kind)}}}


def reference(kind: Any) -> Object:
    """Return the schema of a type, with references to those of structs."""
    (schema,), _ = msgspec.json.schema_components([plain(kind)], ref_template=REFERENCE)
    return schema
