"""The response of `/v1/models`, constant while a server runs."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from headrace.board.model_status import ModelStatus
from headrace.config.process_configs import ModelCard
from headrace.response_bodies.server import (
    AnthropicModel,
    AnthropicModelList,
    LoadStatus,
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


def status_of(status: ModelStatus) -> LoadStatus:
    """Return whether a model is loaded."""
    return LoadStatus(
        value="sleeping" if status.is_asleep else status.state.value,
        progress=round(status.progress, 3),
        waiting=status.num_waiting,
        failed=bool(status.failure),
        error=f"its engine {status.failure}" if status.failure else None,
    )


def adapter_model_of(card: ModelCard, created: int, name: str, path: str) -> ServedModel:
    """Return an adapter in OpenAI's shape, with vLLM's `parent`."""
    model = model_of(card, created)
    return msgspec.structs.replace(model, id=name, root=path, parent=card.name)


def model_list(
    models: Sequence[ServedModel], adapters: Sequence[ServedModel] = ()
) -> ModelListResponse:
    """Return the list of models, and of the first one's adapters."""
    return ModelListResponse(object="list", data=[*models, *adapters])


def anthropic_model_of(card: ModelCard, created: int) -> AnthropicModel:
    """Return a model in Anthropic's shape."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(id=card.name, display_name=card.name, created_at=at)


def model_pages(cards: Sequence[ModelCard], created: int) -> dict[str, bytes]:
    """Return the list, and each model, by path, in OpenAI's shape."""
    each = [model_of(card, created) for card in cards]
    return encoded({MODELS: model_list(each), **{f"{MODELS}/{one.id}": one for one in each}})


def anthropic_model_pages(cards: Sequence[ModelCard], created: int) -> dict[str, bytes]:
    """Return the same for clients that send `anthropic-version`."""
    models = [anthropic_model_of(card, created) for card in cards]
    all_models = AnthropicModelList(
        data=models, has_more=False, first_id=models[0].id, last_id=models[-1].id
    )
    return encoded({MODELS: all_models, **{f"{MODELS}/{model.id}": model for model in models}})


def encoded(bodies: Mapping[str, msgspec.Struct]) -> dict[str, bytes]:
    """Return bodies as JSON."""
    return {path: msgspec.json.encode(body) for path, body in bodies.items()}
