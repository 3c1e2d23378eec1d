"""The response of `/v1/models`, constant while a server runs."""

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from headrace.config.process_configs import ModelCard
from headrace.response_bodies.server import (
    AnthropicModel,
    AnthropicModelList,
    ModelListResponse,
    ServedModel,
)
from headrace.routes import MODELS


def model_of(card: ModelCard, created: int) -> ServedModel:
    """Return a model in OpenAI's shape; `created` is in seconds since the epoch."""
    return ServedModel(
        id=card.name,
        object="model",
        created=created,
        owned_by="headrace",
        root=card.path,
        max_model_len=card.max_model_len,
    )


def adapter_model_of(card: ModelCard, created: int, name: str, path: str) -> ServedModel:
    """Return an adapter in OpenAI's shape, with vLLM's `parent`."""
    model = model_of(card, created)
    return msgspec.structs.replace(model, id=name, root=path, parent=card.name)


def model_list(card: ModelCard, created: int, adapters: Mapping[str, str]) -> ModelListResponse:
    """Return the list of the model and its adapters, whose paths are given by name."""
    data = [adapter_model_of(card, created, *adapter) for adapter in adapters.items()]
    return ModelListResponse(object="list", data=[model_of(card, created), *data])


def anthropic_model_of(card: ModelCard, created: int) -> AnthropicModel:
    """Return a model in Anthropic's shape."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(id=card.name, display_name=card.name, created_at=at)


def model_pages(card: ModelCard, created: int) -> dict[str, bytes]:
    """Return the list, and the one model, by path, in OpenAI's shape."""
    model = model_of(card, created)
    return {
        MODELS: msgspec.json.encode(ModelListResponse(object="list", data=[model])),
        f"{MODELS}/{card.name}": msgspec.json.encode(model),
    }


def anthropic_model_pages(card: ModelCard, created: int) -> dict[str, bytes]:
    """Return the same for clients that send `anthropic-version`."""
    model = anthropic_model_of(card, created)
    models = AnthropicModelList(data=[model], has_more=False, first_id=card.name, last_id=card.name)
    return {
        MODELS: msgspec.json.encode(models),
        f"{MODELS}/{card.name}": msgspec.json.encode(model),
    }
