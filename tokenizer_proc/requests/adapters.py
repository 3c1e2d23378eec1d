"""Requests to load and unload adapters (LoRA), in vLLM's form and SGLang's."""

from typing import TypeVar

import msgspec

from headrace.errors import BAD_JSON, InvalidBody

T = TypeVar("T", bound=msgspec.Struct)


class LoadLora(msgspec.Struct):
    """The body of a request to load an adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # in place of another of that name


class UnloadLora(msgspec.Struct):
    """The body of a request to unload an adapter."""

    lora_name: str


def decoded(body: bytes | memoryview, kind: type[T]) -> T:
    """Decode a body."""
    try:
        return msgspec.json.decode(body, type=kind)
    except BAD_JSON as error:
        raise InvalidBody(f"the body is not what this route takes: {error}") from None
