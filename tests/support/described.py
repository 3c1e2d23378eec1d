"""Check a server's output against its own OpenAPI description."""

import functools
from typing import Any

import httpx
from jsonschema import Draft202012Validator

EVENTS = "text/event-stream"


@functools.cache
def description(url: str) -> Any:
    return httpx.get(f"{url}/openapi.json").json()


def check_event(url: str, path: str, data: Any) -> None:
    """Check the data of an event by the schema that `/openapi.json` has for it."""
    whole = description(url)
    content = whole["paths"][path]["post"]["responses"]["200"]["content"]
    schema = content[EVENTS]["schema"]["properties"]["data"]
    schema = schema.get("anyOf", [schema])[0]["contentSchema"]
    Draft202012Validator(schema | {"components": whole["components"]}).validate(data)
