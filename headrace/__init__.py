"""Headrace: a multi-process LLM serving engine. Importing this package costs nothing."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client.client import AsyncClient, Client
    from headrace.errors import ApiConnectionError, ApiError, ApiTimeoutError, EngineDied
    from headrace.offline.engine import AsyncEngine, Engine
    from headrace.offline.lora_request import LoRARequest
    from headrace.offline.requests import RequestOutput
    from headrace.offline.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "ApiConnectionError",
    "ApiError",
    "ApiTimeoutError",
    "AsyncClient",
    "AsyncEngine",
    "Client",
    "Engine",
    "EngineDied",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

HOMES = {
    "ApiConnectionError": "headrace.errors",
    "ApiError": "headrace.errors",
    "ApiTimeoutError": "headrace.errors",
    "AsyncClient": "headrace.client.client",
    "AsyncEngine": "headrace.offline.engine",
    "Client": "headrace.client.client",
    "Engine": "headrace.offline.engine",
    "EngineDied": "headrace.errors",
    "LoRARequest": "headrace.offline.lora_request",
    "RequestOutput": "headrace.offline.requests",
    "SamplingParams": "headrace.offline.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import public names on access: the server's processes need neither httpx nor tqdm."""
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module 'headrace' has no attribute '{name}'")
