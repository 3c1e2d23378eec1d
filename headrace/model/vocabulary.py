"""Whether two models have the same vocabulary."""

from pathlib import Path
from typing import Any

from headrace.model.tokenizer_json import read_tokenizer_spec


def read_vocabulary(path: Path) -> dict[int, str]:
    """Return the tokens of a model, a folder or a .gguf file, by id.

    Raises:
        ModelError: it has no tokenizer, or one that is not known here.
    """
    spec = read_tokenizer_spec(path)
    pieces: dict[str, int] | list[Any] = spec["model"]["vocab"]
    if isinstance(pieces, list):  # Unigram: pieces and their scores
        pieces = {piece: id for id, (piece, _) in enumerate(pieces)}
    tokens = {id: token for token, id in pieces.items()}
    return tokens | {added["id"]: added["content"] for added in spec.get("added_tokens", [])}


def first_difference(one: dict[int, str], other: dict[int, str]) -> int | None:
    """Return the first token that is another in another vocabulary; None where they agree.

    One may be longer: its further tokens are padding.
    """
    end = min(max(one), max(other)) + 1
    differing = (id for id in range(end) if one.get(id) != other.get(id))
    return next(differing, None)
