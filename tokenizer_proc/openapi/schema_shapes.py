"""Schemas of the tools and texts within a body."""

from typing import Any

from headrace.tokenizer_proc.requests.tools import NAME

Object = dict[str, Any]

TEXT = {"type": "string"}
NAMED = {"type": "string", "pattern": f"^{NAME.pattern}$"}
PARAMETERS = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "object"}}},
        {"type": "null"},
    ]
}
# By struct, the schemas of its fields.
FIELDS: dict[str, Object] = {
    "Function": {"name": NAMED, "parameters": PARAMETERS},
    "CustomFunction": {"name": NAMED},
    "OfferedTool": {"name": NAMED, "input_schema": PARAMETERS, "type": {"enum": ["custom", None]}},
    "OfferedFunction": {
        "name": NAMED,
        "type": {"enum": ["custom", "function"]},
        "parameters": PARAMETERS,
    },
    "TextPart": {"type": {"const": "text"}, "text": TEXT},
}
REQUIRED = {"OfferedFunction": ["type", "name"], "TextPart": ["type", "text"]}


def add_shapes(components: Object) -> None:
    """Add to schemas, by name, what their fields have to be."""
    for path, schema in components.items():
        module, _, name = path.rpartition(".")
        if module and not module.endswith("_requests"):  # an answer's, of the same name
            continue
        for field, shape in FIELDS.get(name, {}).items():
            schema["properties"][field] = shape
        if name in REQUIRED:
            schema["required"] = REQUIRED[name]
