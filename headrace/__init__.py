"""Headrace: a multi-process LLM serving engine. Importing this package costs nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client import AsyncClient, Client
    from headrace.errors import ApiError

__version__ = "0.1.0"
__all__ = ["ApiError", "AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the client only where it is used: the server's processes need no httpx."""
    if name in ("AsyncClient", "Client"):
        from headrace import client

        return getattr(client, name)
    if name == "ApiError":
        from headrace.errors import ApiError

        return ApiError
    raise AttributeError(f"module 'headrace' has no attribute '{name}'")
