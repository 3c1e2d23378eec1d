"""A request that a scripted server has had: an entry of `GET /mock/requests`."""

from typing import Any

import msgspec


class RecordedRequest(msgspec.Struct, frozen=True):
    """A request for a text, as the client sent it."""

    path: str
    received_at: float  # seconds since the epoch
    body: dict[str, Any]

    @property
    def model(self) -> str | None:
        """The model that it names."""
        return self.body.get("model")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of a chat, in the client's own form; empty where there is another prompt."""
        messages: list[dict[str, Any]] = self.body.get("messages", [])
        return messages

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools that it offers."""
        return self.body.get("tools") or []
