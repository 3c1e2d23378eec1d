"""What a server sends, against its own description."""

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


def answer_examples(url: str) -> set[str]:
    """Send all requests that `/openapi.json` has as examples; return their paths."""
    paths = set()
    for path, operations in description(url)["paths"].items():
        body = operations.get("post", {}).get("requestBody", {}).get("content", {})
        for title, example in body.get("application/json", {}).get("examples", {}).items():
            response = httpx.post(url + path, json=example["value"])
            assert response.status_code == 200, (path, title, response.text)
            paths.add(path)
    return paths
