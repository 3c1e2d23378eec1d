"""Reads a model's config strictly: a field that no reader asks for is an error."""

import math
from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelError

REQUIRED: Any = object()
MAX_NUMBER = 3.4e38  # what fp32 holds


class ConfigFields:
    """The fields of one config. Every field read is remembered, so that the rest can be refused.

    A field that is present as null counts as absent.

    Args:
        owner: for messages: "a llama model".
        names: what messages call fields that the user's file has under other names.
    """

    def __init__(
        self, values: Mapping[str, Any], owner: str, names: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.owner = owner
        self.names = names or {}
        self.read: set[str] = set()

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a field of any type."""
        self.read.add(name)
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ModelError(f"the config of {self.owner} lacks {self.names.get(name, name)!r}")
        return default

    def integer(self, name: str, default: Any = REQUIRED) -> int:
        """Return a positive count."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a positive integer")
        return value

    def number(self, name: str, default: Any = REQUIRED) -> float:
        """Return a number that fp32 holds."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, "a number")
        if not -MAX_NUMBER <= value <= MAX_NUMBER:  # nor is NaN within
            raise self.wrong(name, "a number that fp32 holds")
        return float(value)

    def positive(self, name: str, default: Any = REQUIRED) -> float:
        """Return a finite number above 0."""
        value = self.number(name, default)
        if not 0 < value < math.inf:
            raise self.wrong(name, "a positive number")
        return value

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name, None) is None else self.number(name)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a nested object, empty if absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def choice(self, name: str, choices: Mapping[str, Any], default: Any = REQUIRED) -> Any:
        """Return what `choices` holds for the field's text."""
        text = self.text(name, default)
        if text not in choices:
            raise self.wrong(name, " or ".join(repr(choice) for choice in choices))
        return choices[text]

    def one_per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """Return a list with an item for each layer, or None if absent."""
        value = self.get(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < num_layers:
            raise self.wrong(name, f"a list of {num_layers}")
        return value[:num_layers]

    def wrong(self, name: str, right: str) -> ModelError:
        """The error for a field whose value cannot be executed."""
        value, name = self.values.get(name), self.names.get(name, name)
        return ModelError(f"the config of {self.owner} has {name!r}: {value!r}, not {right}")

    def refuse_unread(self, inert: frozenset[str] = frozenset()) -> None:
        """Refuse fields that were not read, unless `inert`, private, or switched off."""
        for name, value in self.values.items():
            if name not in self.read | inert and not name.startswith("_") and value:
                raise ModelError(
                    f"the config of {self.owner} has {self.names.get(name, name)!r}: {value!r}, "
                    "which is not supported; remove the field if it changes nothing"
                )
