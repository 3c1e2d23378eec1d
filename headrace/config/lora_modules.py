"""The values of `--lora-modules`: `NAME=PATH`, or vLLM's JSON with `name` and `path`."""

from collections.abc import Iterable

import msgspec

from headrace.errors import BAD_JSON, ConfigError


class LoraModule(msgspec.Struct):
    """An adapter that a server has from its start."""

    name: str
    path: str
    base_model_name: str | None = None  # vLLM's; there is one base


def lora_modules(values: Iterable[str]) -> list[LoraModule]:
    """Return the adapters that the flag names.

    Raises:
        ConfigError: a value is neither form, or a name comes twice.
    """
    modules = [lora_module(value) for value in values]
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--lora-modules names {name} twice")
    return modules


def lora_module(value: str) -> LoraModule:
    """Return the adapter of one value."""
    name, equals, path = value.partition("=")
    if value.startswith("{"):
        try:
            return msgspec.json.decode(value, type=LoraModule)
        except BAD_JSON as error:
            raise ConfigError(f"--lora-modules {value}: {error}") from None
    if not (name and equals and path):
        raise ConfigError(f"--lora-modules {value} is not NAME=PATH, nor JSON with name and path")
    return LoraModule(name, path)
