"""Chat templates of families whose folders have code in place of one, or none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.model.pooling import QWEN3_RERANKER, is_token_classifier

FOLDER = Path(__file__).parent / "templates"
FAMILIES = ("deepseek_v32", "paligemma")  # by `model_type`; each has a file here
GEMMAS = ("gemma", "gemma2")
PAIR_ROLES = ("query", "document")  # of the two texts that a reranker compares


def own_template(family: str | None) -> str | None:
    """Return the template of a family; None where its folders are to have one."""
    return read_template(family) if family in FAMILIES else None


def pair_template(config: Mapping[str, Any]) -> str | None:
    """Return the published prompt of a reranker that scores by tokens; None of other models."""
    if not is_token_classifier(config):
        return None
    if config.get(QWEN3_RERANKER):
        return read_template("qwen3_reranker")
    return read_template("gemma_reranker") if config.get("model_type") in GEMMAS else None


def compares_pairs(template: str) -> bool:
    """Whether a template prompts a reranker: it names the roles of a query and a document."""
    return all(f'"{role}"' in template.replace("'", '"') for role in PAIR_ROLES)


def read_template(name: str) -> str:
    """Read a file of this package."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
