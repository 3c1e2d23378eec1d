"""`/openapi.json`: what this server takes and answers, from the structs that decode it.

https://spec.openapis.org/oas/v3.1.0
"""

import functools
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import msgspec

from headrace import __version__, routes
from headrace.config.process_configs import ModelCard
from headrace.response_bodies.errors import AnthropicError, CohereError, Error, JinaError
from headrace.routes import ANTHROPIC_PATHS, COHERE_PATHS, JINA_PATHS, ROUTES, Lane, Need, Route
from headrace.tokenizer_proc.openapi.route_bodies import (
    BODIES,
    CONTENT_TYPES,
    JSON,
    BodyTypes,
    Examples,
    examples_of,
)
from headrace.tokenizer_proc.openapi.schema_needs import add_needs
from headrace.tokenizer_proc.openapi.schema_parts import add_parts
from headrace.tokenizer_proc.openapi.schema_shapes import add_shapes
from headrace.tokenizer_proc.requests.openai import (
    CompletionRequest,
    EmbeddingRequest,
)
from headrace.tokenizer_proc.requests.sampling import OWN_RANGES, RANGES

Object = dict[str, Any]

REFERENCE = "#/components/schemas/{name}"
NUMBERS = ("integer", "number")
SECURITY = {
    "key": {"type": "http", "scheme": "bearer"},
    "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
NAMES_OF_MODELS = ("model", "lora_path")
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


class Operation(NamedTuple):
    """A route with its bodies."""

    route: Route
    bodies: BodyTypes


OPERATIONS = [Operation(route, BODIES[route.path]) for route in ROUTES]


def openapi(
    cards: Sequence[ModelCard], follows_grammars: bool = True, trusts_templates: bool = False
) -> bytes:
    """Return the description, JSON, of a server of some models."""
    paths: Object = {}
    offers_tools = any(card.tool_format is not None for card in cards)
    for operation in operations_of(cards):
        path, method = operation.route.path, operation.route.method.lower()
        examples = examples_of(path, offers_tools, follows_grammars)
        paths[path] = {method: described(operation, examples)}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Headrace",
                "version": __version__,
                "description": "The API of a server of the "
                f"{'model' if len(cards) == 1 else 'models'} "
                f"{', '.join(card.name for card in cards)}.",
            },
            "paths": paths,
            "components": {
                "schemas": schemas(cards, follows_grammars, trusts_templates),
                "securitySchemes": SECURITY,
            },
            "security": [{}, *({name: []} for name in SECURITY)],
        }
    )


def operations_of(cards: Sequence[ModelCard]) -> list[Operation]:
    """Return the operations that one of the models is served by."""
    return [one for one in OPERATIONS if any(meets(card, one.route.need) for card in cards)]


def meets(card: ModelCard, need: Need) -> bool:
    """Whether a model does what a route needs."""
    generates = not (card.embeds or card.compares)
    match need:
        case Need.GENERATION | Need.ADAPTERS:
            return generates
        case Need.CHAT_TEMPLATE:
            return generates and card.takes_chats
        case Need.EMBEDDINGS:
            return card.embeds
        case Need.SCORES:
            return not generates
        case Need.NOTHING:
            return True


def schemas(
    cards: Sequence[ModelCard], follows_grammars: bool = True, trusts_templates: bool = False
) -> Object:
    """Return the schema of every struct by name, without what vLLM and SGLang alone have.

    A limit is that of the model that allows most.
    """
    kinds = [
        kind for operation in operations_of(cards) for kind in operation.bodies if kind is not None
    ]
    _, components = msgspec.json.schema_components(
        [*map(plain, kinds), Error, AnthropicError, CohereError, JinaError],
        ref_template=REFERENCE,
    )
    for kind, name in TEXT_OR_IDS_FIELDS.items():
        if kind.__name__ not in components:
            continue
        components[kind.__name__]["properties"][name] = deepcopy(TEXT_OR_IDS)
    kinds_of_bodies = {one.request.__name__ for one in BODIES.values() if one.request is not None}
    for kind_name, schema in components.items():
        ranges = RANGES | OWN_RANGES.get(kind_name, {})
        fields = schema.get("properties", {})
        for name, field in fields.items():
            limit(field, *ranges.get(name, (None, None)))
            if name in NAMES_OF_MODELS and kind_name in kinds_of_bodies:
                names = [card.name for card in cards]
                fields[name] = {"enum": [*names, None], "default": None}
    if not trusts_templates:
        for schema in components.values():
            schema.get("properties", {}).pop("chat_template", None)
    add_shapes(components)
    add_parts(components, cards[0].image_token is not None)
    add_needs(
        components,
        max(card.vocab_size for card in cards),
        follows_grammars,
        offers=any(card.tool_format is not None for card in cards),
        absent=absent(cards),
    )
    return components


def absent(cards: Sequence[ModelCard]) -> dict[str, set[str]]:
    """Return the fields, by kind of body, that no model and no template has a place for."""
    infills = any(card.infill_token_ids for card in cards)
    found = {} if infills else {"CompletionRequest": {"suffix"}}
    has_place = any("documents" in (card.chat_template or "") for card in cards)
    return found if has_place else found | {"ChatRequest": {"documents"}}


@functools.cache  # several routes take a kind, which has one description
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


def described(operation: Operation, examples: Examples) -> Object:
    """Return the description of one operation."""
    route, bodies = operation
    answer = {"schema": {} if bodies.response is None else reference(bodies.response)}
    content = {CONTENT_TYPES.get(route.path, JSON): answer}
    if bodies.events is not None:
        content["text/event-stream"] = {"schema": event_schema(bodies)}
    found: Object = {
        "operationId": route.path.strip("/").replace("/", "_").removesuffix(".json"),
        "summary": route.summary,
        "tags": [tag_of(route)],
        "responses": {"200": {"description": "The answer", "content": content}}
        | dict(errors(operation)),
    }
    if bodies.request is not None:
        shown = {title: {"value": example} for title, example in examples.items()}
        body = {JSON: {"schema": reference(bodies.request), "examples": shown}}
        found["requestBody"] = {"required": True, "content": body}
    return found


def tag_of(route: Route) -> str:
    """Return the heading of a route in documents."""
    if route.lane in (Lane.FRONTEND, Lane.INFO, Lane.FILE):
        return "Server"
    match route.need:
        case Need.GENERATION | Need.CHAT_TEMPLATE:
            return "Generation"
        case Need.EMBEDDINGS | Need.SCORES:
            return "Embeddings and scores"
        case Need.ADAPTERS:
            return "Adapters"
        case Need.NOTHING:
            return "Tokens"


def event_schema(bodies: BodyTypes) -> Object:
    """Return the schema of each event of a stream, as an object of its fields."""
    data: Object = {"type": "string", "contentMediaType": JSON}
    schema = reference(bodies.events)
    if "discriminator" in schema:  # one of these events is that of failures
        data["contentSchema"] = schema
    else:
        data["contentSchema"] = {"anyOf": [schema, reference(Error)]}
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    properties = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "properties": properties, "required": ["data"]}


def errors(operation: Operation) -> Iterator[tuple[str, Object]]:
    """Yield the errors an operation may end in, by status."""
    route, bodies = operation
    if route.lane is Lane.FRONTEND:  # which needs no key, and says why
        health = {JSON: {"schema": reference(bodies.response)}}
        yield "503", {"description": "It is not so, and why", "content": health}
        return
    if route.lane is Lane.FILE:
        return
    statuses = {"401": "No valid API key"}
    if route.need is Need.ADAPTERS:
        statuses["403"] = "Only operators may do so"
    if bodies.request is not None:
        statuses |= {
            "400": "The request is not valid; the text names the field",
            "404": "There is no such model",
            "413": "The body is too large",
            "415": "The body's type is not application/json",
            "429": "There is too much to do; see Retry-After",
            "503": "The server is not ready",
        }
    if route.path == routes.RING_EVENTS:
        statuses["503"] = "Too many clients read the events already"
    kind: type[msgspec.Struct] = Error
    if route.path.startswith(ANTHROPIC_PATHS):
        kind = AnthropicError
    elif route.path in COHERE_PATHS:
        kind = CohereError
    elif route.path in JINA_PATHS:
        kind = JinaError
    for status, why in statuses.items():
        yield status, {"description": why, "content": {JSON: {"schema": reference(kind)}}}


def reference(kind: Any) -> Object:
    """Return the schema of a type, with references to those of structs."""
    (schema,), _ = msgspec.json.schema_components([plain(kind)], ref_template=REFERENCE)
    return schema
