"""LongRoPE in a model's config: frequencies that depend on the length of a text."""

from collections.abc import Mapping
from typing import Any

KIND, LENGTH = "longrope", "original_max_position_embeddings"


def trained_length(config: Mapping[str, Any]) -> int | None:
    """Return the longest text with the short factors, in tokens; None without LongRoPE."""
    for name in ("rope_scaling", "rope_parameters"):
        params = config.get(name)
        if isinstance(params, dict) and KIND in (params.get("rope_type"), params.get("type")):
            length = params.get(LENGTH) or config.get(LENGTH)
            return length if isinstance(length, int) and length > 1 else None
    return None
