"""Default sampling parameters and lengths, where a request has none: the model authors', or
OpenAI."""

from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ModelError

TINY = 1e-6  # above zero
RANGES = {
    "temperature": (0, 2),
    "top_p": (TINY, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (TINY, 2),
    "max_new_tokens": (1, 2**31 - 1),
}


class SamplingDefaults(msgspec.Struct, frozen=True):
    """OpenAI's defaults, unless a model has its own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # of an answer; None is all there is room for


OPENAI = SamplingDefaults()


def read_defaults(path: Path, generation: dict[str, Any]) -> SamplingDefaults:
    """Read the defaults of `generation_config.json` at `path`. Null counts as absent.

    Raises:
        ModelError: a number is not one, or out of its range.
    """
    stated = {name: generation[name] for name in RANGES if generation.get(name) is not None}
    try:
        found = msgspec.convert(stated, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from None
    for name, value in stated.items():
        low, high = RANGES[name]
        if not low <= value <= high:
            raise ModelError(f"{path}: {name} must be between {low} and {high}, not {value}")
    return found
