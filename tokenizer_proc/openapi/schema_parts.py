"""Messages and their parts in schemas: the fields of each `type`.

The structs that decode them have the fields of all types. Images are described where the model
takes some.
"""

from collections.abc import Callable
from typing import Any

from headrace.tokenizer_proc.requests.responses import FILE, IMAGE, TEXT_PARTS, THOUGHT_PARTS
from headrace.tokenizer_proc.requests.text_files import ALSO_TEXT

Object = dict[str, Any]

REFERENCE = "#/components/schemas/"
NULL = {"type": "null"}
TEXT = {"type": "string"}
SOME_TEXT = {"anyOf": [TEXT, NULL]}
FILE_URL = {
    "type": "string",
    "pattern": "^data:([Tt][Ee][Xx][Tt]/[^,;]*|application/(json|xml|yaml|x-yaml))?(;[^,;]*)*,",
    "format": "text-data-url",
}
BASE64_TEXT = {"type": "string", "contentEncoding": "base64", "format": "base64-text"}
TEXT_TYPE = {
    "anyOf": [
        {"type": "string", "pattern": "^[Tt][Ee][Xx][Tt]/"},
        {"enum": ["", *ALSO_TEXT]},
        NULL,
    ]
}


def part(type: str | list[str], needs: Object, more: Object | None = None) -> Object:
    """Return the schema of a part by its type: the fields it needs, and those it may have."""
    known: Object = {"const": type} if isinstance(type, str) else {"enum": type}
    properties = {"type": known, **needs, **(more or {})}
    return {"type": "object", "properties": properties, "required": ["type", *needs]}


def one_of(*schemas: Object) -> Object:
    """Return that a value has one of some schemas."""
    return {"anyOf": list(schemas)}


def some(items: Object, least: int = 0) -> Object:
    """Return the schema of a list."""
    return {"type": "array", "items": items} | ({"minItems": least} if least else {})


def referred(name: str) -> Object:
    """Return a reference to a schema."""
    return {"$ref": REFERENCE + name}


def chat_parts(takes_images: bool) -> Object:
    """Return the schema of `content[]` of a chat's message."""
    file = {
        "type": "object",
        "properties": {"file_data": FILE_URL, "filename": SOME_TEXT},
        "required": ["file_data"],
    }
    found = [part("text", {"text": TEXT}), part("file", {"file": file})]
    if takes_images:
        found.append(part("image_url", {"image_url": referred("ImageUrl")}))
    return one_of(*found)


def input_parts(takes_images: bool) -> Object:
    """Return the schema of `content[]` of an item of `/v1/responses`."""
    found = [
        part(list(TEXT_PARTS), {"text": TEXT}),
        part(FILE, {"file_data": FILE_URL}, {"filename": SOME_TEXT}),
    ]
    if takes_images:
        found.append(part(IMAGE, {"image_url": TEXT}, {"detail": SOME_TEXT}))
    return one_of(*found)


def input_items() -> Object:
    """Return the schema of `input[]` of `/v1/responses`. Without a type it is a message."""
    roles = {"enum": ["assistant", "developer", "system", "user"]}
    known = one_of(TEXT, some(referred("InputPart")))
    thought = some(part(list(THOUGHT_PARTS), {"text": TEXT}))
    message = part("message", {"role": roles, "content": known})
    message["required"] = ["role", "content"]
    called: Object = {"call_id": SOME_TEXT}
    return one_of(
        message,
        part("function_call", {"name": TEXT, "arguments": TEXT}, called),
        part("custom_tool_call", {"name": TEXT, "input": TEXT}, called),
        part(
            ["function_call_output", "custom_tool_call_output"],
            {},
            called | {"output": one_of(*known["anyOf"], NULL)},
        ),
        part(
            "reasoning",
            {},
            {"content": one_of(TEXT, thought, NULL), "summary": one_of(thought, NULL)},
        ),
    )


def input_format() -> Object:
    """Return the schema of `format` of a custom tool of `/v1/responses`."""
    syntax = {"enum": ["lark", "regex"]}
    return one_of(part("text", {}), part("grammar", {"definition": TEXT, "syntax": syntax}))


def shown_blocks(takes_images: bool) -> Object:
    """Return the schema of what a tool may have answered in `/v1/messages`."""
    document = one_of(
        part("text", {"data": TEXT}, {"media_type": TEXT_TYPE}),
        part("base64", {"data": BASE64_TEXT}, {"media_type": TEXT_TYPE}),
        part("content", {"content": one_of(TEXT, some(referred("TextPart")))}),
    )
    cited = {"type": "object", "properties": {"enabled": {"const": False}}}
    more = {"title": SOME_TEXT, "context": SOME_TEXT, "citations": one_of(cited, NULL)}
    found = [part("text", {"text": TEXT}), part("document", {"source": document}, more)]
    if takes_images:
        source = one_of(
            part("base64", {"media_type": TEXT, "data": TEXT}), part("url", {"url": TEXT})
        )
        found.append(part("image", {"source": source}))
    return one_of(*found)


def blocks(takes_images: bool) -> Object:
    """Return the schema of `content[]` of a message of `/v1/messages`."""
    answer = one_of(TEXT, some(referred("Shown")), NULL)
    return one_of(
        *shown_blocks(takes_images)["anyOf"],
        part("thinking", {"thinking": TEXT}),
        part("redacted_thinking", {}),
        part("tool_use", {"name": TEXT, "input": {"type": "object"}}, {"id": SOME_TEXT}),
        part("tool_result", {}, {"tool_use_id": SOME_TEXT, "content": answer}),
    )


def called_tool(schema: Object) -> Object:
    """Return the schema of a call in a chat: of a function, or of a custom tool."""
    known = schema["properties"]
    function, custom = (
        part(name, {name: known[name]["anyOf"][0]}, {"id": SOME_TEXT})
        for name in ("function", "custom")
    )
    function["required"], custom["required"] = ["function"], ["custom"]
    return one_of(function, custom)


def request_message(schema: Object) -> Object:
    """Return the schema of a chat's message: only the assistant's that calls needs no content."""
    calls = []
    for name, other in (("tool_calls", "function_call"), ("function_call", "tool_calls")):
        one = needing(schema, name)
        one["properties"] |= {"role": {"const": "assistant"}, "content": NULL, other: NULL}
        calls.append(one)
    calls[0]["properties"]["tool_calls"]["minItems"] = 1
    return one_of(needing(schema, "content"), *calls)


def offered_function(schema: Object) -> Object:
    """Return the schema of an entry of `tools` of `/v1/responses`."""
    known = schema["properties"]
    shared = {"description": known["description"]}
    called = {"parameters": known["parameters"], "strict": known["strict"]}
    return one_of(
        part("function", {"name": known["name"]}, shared | called),
        part("custom", {"name": known["name"]}, shared | {"format": known["format"]}),
    )


def needing(schema: Object, name: str) -> Object:
    """Return the schema of an object, one of whose fields has to be there and is not null."""
    properties = {field: dict(form) for field, form in schema["properties"].items()}
    forms = [form for form in properties[name]["anyOf"] if form != NULL]
    properties[name] = dict(forms[0]) if len(forms) == 1 else {"anyOf": forms}
    required = [*schema["required"], name]
    return {"type": "object", "properties": properties, "required": required}


def discriminate(components: Object, name: str) -> None:
    """Name the schemas of a part, so that `type` selects one of them.

    A part whose type may be left out, or is one of several, stays as it is.
    """
    parts: list[Object] = components[name]["anyOf"]
    types = [one["properties"]["type"].get("const") for one in parts]
    if None in types or any("type" not in one["required"] for one in parts):
        return
    named = {type: f"{name}.{type}" for type in types}
    components |= dict(zip(named.values(), parts, strict=True))
    components[name]["anyOf"] = [referred(one) for one in named.values()]
    mapping = {type: REFERENCE + one for type, one in named.items()}
    components[name]["discriminator"] = {"propertyName": "type", "mapping": mapping}


MADE_OF: dict[str, Callable[[Object], Object]] = {
    "CalledTool": called_tool,
    "RequestMessage": request_message,
    "OfferedFunction": offered_function,
}


def add_parts(components: Object, takes_images: bool) -> None:
    """Replace schemas that are equal for all types by those of each type."""
    known: dict[str, Object] = {
        "ContentPart": chat_parts(takes_images),
        "InputPart": input_parts(takes_images),
        "InputItem": input_items(),
        "InputFormat": input_format(),
        "Shown": shown_blocks(takes_images),
        "Block": blocks(takes_images),
    }
    for path, schema in list(components.items()):
        module, _, name = path.rpartition(".")
        if module and ".apis" not in module:  # a response's, of the same name
            continue
        heading = {key: schema[key] for key in ("title", "description") if key in schema}
        if name in known:
            components[path] = heading | known[name]
            discriminate(components, path)
        elif name in MADE_OF:
            components[path] = heading | MADE_OF[name](schema)
