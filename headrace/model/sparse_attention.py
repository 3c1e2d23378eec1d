"""Sparse attention in a model's config: an indexer chooses the tokens that a token attends to."""

from collections.abc import Mapping
from typing import Any

FAMILIES = ("deepseek_v32", "glm_moe_dsa")  # DeepSeek V3.2, GLM-5
CHOSEN = "index_topk"
DEFAULT = 2048  # of both


def dense_length(config: Mapping[str, Any]) -> int | None:
    """Return the longest text whose tokens are all chosen; None without an indexer.

    Up to there, sparse attention is dense attention, and the indexer changes nothing.
    """
    if config.get("model_type") not in FAMILIES:
        return None
    chosen = config.get(CHOSEN) or DEFAULT
    return chosen if isinstance(chosen, int) and chosen > 0 else None
