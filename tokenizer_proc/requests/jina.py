"""What Jina's API adds to `/v1/embeddings`: https://api.jina.ai/scalar.

`task` chooses one of the prompts that a model's files have, as Cohere's `input_type` does.
"""

from collections.abc import Mapping

from headrace.errors import InvalidValue, Unsupported
from headrace.ipc.messages import EmbeddingType
from headrace.tokenizer_proc.requests.openai import EmbeddingRequest

# What the second half of a task is called in the prompts of models.
ROLES = {"query": ("query",), "passage": ("document", "passage")}


def check_jina(request: EmbeddingRequest) -> None:
    """Refuse what Jina's API has and no model here does."""
    if request.late_chunking:
        raise Unsupported(
            "late_chunking: each text is embedded by itself; leave it out", "late_chunking"
        )
    if request.return_multivector:
        raise Unsupported(
            "return_multivector: a text has one vector; leave it out", "return_multivector"
        )
    if request.truncate_dim is not None:
        raise Unsupported(f"truncate_dim: use dimensions: {request.truncate_dim}", "truncate_dim")
    if isinstance(request.embedding_type, list) and len(request.embedding_type) != 1:
        raise Unsupported("embedding_type: must be one type, not several", "embedding_type")


def types_of(request: EmbeddingRequest) -> list[EmbeddingType]:
    """Return the type of the vectors, as a list; none where `encoding_format` tells it."""
    named = request.embedding_type
    if named is None:
        return []
    return [*named] if isinstance(named, list) else [named]


def task_prompt(task: str | None, prompts: Mapping[str, str]) -> str:
    """Return what is written before each text.

    Args:
        prompts: the model's, by names in lower case.

    Raises:
        InvalidValue: the model has none for the task.
    """
    if task is None:
        return ""
    kind, _, role = task.lower().partition(".")
    roles = ROLES.get(role, ())
    names = [task.lower(), *(f"{kind}_{one}" for one in roles)]
    if kind == "retrieval":
        names += roles
    for name in names:
        if name in prompts:
            return prompts[name]
    known = ", ".join(prompts) or "none"
    raise InvalidValue(
        f"task: the model has no prompt for {task!r:.60}; its prompts are: {known}", "task"
    )
