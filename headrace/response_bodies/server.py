"""Bodies of routes about the server: models, version, load, health."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from headrace.response_bodies.base import Typed, Whole


class LoadStatus(Whole):
    """Whether a model is loaded; `value` is as llama.cpp has it."""

    value: Literal["unloaded", "loading", "loaded", "unloading", "sleeping"]
    progress: float  # of its load, 0 to 1
    waiting: int  # sequences that wait for it
    failed: bool  # it could not be loaded, and is not tried again for some seconds
    error: str | None = None  # why


class ServedModel(Whole):
    """The model that the server has. `root` is its folder, or its name at a hub."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    parent: str | None = None  # of an adapter, the model
    status: LoadStatus | UnsetType = UNSET  # where models come and go


class ModelListResponse(Whole):
    """Response of `/v1/models`."""

    object: Literal["list"]
    data: list[ServedModel]


class AnthropicModel(Typed, tag="model"):
    """The same model in Anthropic's shape: https://docs.anthropic.com/en/api/models."""

    id: str
    display_name: str
    created_at: str


class AnthropicModelList(Whole):
    """Response of `/v1/models` to clients that send `anthropic-version`."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


class VersionResponse(Whole):
    """Response of `/version`."""

    version: str


class ProcessHealth(msgspec.Struct):
    """Status of a process, with fields that depend on its role."""

    process: str
    state: Literal["absent", "starting", "ready", "dead"]
    silent_s: float
    restarts: int


class Health(Whole):
    """Response of `/health` and its kin."""

    status: Literal["ok", "unhealthy"]
    reasons: list[str]
    loaded: float
    processes: list[ProcessHealth]


class ServerLoad(Whole):
    """Response of vLLM's `/load`."""

    server_load: int


class ModelInfo(Whole):
    """Response of SGLang's `/model_info`."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    weight_version: str
    has_image_understanding: bool


class ServerInfo(Whole):
    """Response of SGLang's `/server_info`, limited to what applies here."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    max_total_num_tokens: int
    version: str
    internal_states: list[dict[str, float]]
