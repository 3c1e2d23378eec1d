"""What schemas say of fields beyond their types: what is not empty, and what excludes others."""

from typing import Any

Object = dict[str, Any]

NOT_EMPTY = {
    "ChatRequest": ("messages",),
    "MessagesRequest": ("messages",),
    "CountRequest": ("messages",),
    "CompletionRequest": ("prompt",),
    "EmbeddingRequest": ("input",),
    "ResponsesRequest": ("input",),
    "RerankRequest": ("documents",),
    "ScoreRequest": ("text_1", "text_2"),
    "GenerateBody": ("text", "input_ids"),
    "TokenizeRequest": ("messages",),
}
ONE_OF = {"GenerateBody": ("text", "input_ids"), "TokenizeRequest": ("prompt", "messages")}


def add_needs(components: Object) -> None:
    """Add to schemas, by name, what their fields need."""
    for name, fields in NOT_EMPTY.items():
        for field in fields:
            fill(components[name]["properties"][field])
    for name, fields in ONE_OF.items():
        components[name]["oneOf"] = [
            {"required": [field], "properties": {field: {"not": {"type": "null"}}}}
            for field in fields
        ]


def fill(field: Object) -> None:
    """Have a list not be empty, nor a list in it. A text may be: some tokenizers add a token."""
    for given in field.get("anyOf", [field]):
        if given.get("type") == "array":
            given["minItems"] = 1
            fill(given["items"])
