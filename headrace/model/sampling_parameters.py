"""The sampling parameters that APIs share: one line for each defines it completely.

Request structs and `SamplingParams` inherit the fields. Range checks, the bounds in
`/openapi.json` and the engine's `Sampling` are derived.
"""

from math import inf
from typing import Annotated, NamedTuple, get_type_hints

import msgspec


class Parameter(NamedTuple):
    """The numbers a parameter takes, and the one that changes nothing."""

    low: float
    high: float = inf
    excludes_low: bool = False
    default: float = 0.0  # where neither the request nor the model's authors say


class SamplingParameters(msgspec.Struct, kw_only=True):
    """Numbers that a request may set. None is the model's default, else the parameter's."""

    temperature: Annotated[float | None, Parameter(0, default=1.0)] = None  # 0 is greedy
    top_p: Annotated[float | None, Parameter(0, 1, excludes_low=True, default=1.0)] = None
    top_k: Annotated[int | None, Parameter(-1)] = None  # -1 and 0 are all
    min_p: Annotated[float | None, Parameter(0, 1)] = None
    presence_penalty: Annotated[float | None, Parameter(-2, 2)] = None
    frequency_penalty: Annotated[float | None, Parameter(-2, 2)] = None
    repetition_penalty: Annotated[float | None, Parameter(0, 2, excludes_low=True, default=1.0)] = (
        None
    )


def parameters() -> dict[str, Parameter]:
    """Return the parameters by name."""
    hints = get_type_hints(SamplingParameters, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


PARAMETERS = parameters()
