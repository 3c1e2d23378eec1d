"""anthropic: messages."""

from collections.abc import Iterator
from typing import Any

import anthropic
from scenario import CALL_TOKENS, FUNCTION, KEY, MODEL, URL, WEATHER_QUESTION, Call, Person, main

ERROR = anthropic.BadRequestError
client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
CHOICES = {
    "auto": {"type": "auto"},
    "required": {"type": "any"},
    "named": {"type": "tool", "name": FUNCTION["name"]},
}


def asked(question: str, max_tokens: int) -> Any:
    messages = [{"role": "user", "content": question}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": max_tokens}
    return fields | {"extra_body": {"temperature": 0}}


def chat(question: str, max_tokens: int) -> str:
    answer = client.messages.create(**asked(question, max_tokens))
    return "".join(block.text for block in answer.content if block.type == "text")


def stream(question: str, max_tokens: int) -> Iterator[str]:
    with client.messages.stream(**asked(question, max_tokens)) as events:
        yield from events.text_stream


def call(choice: str) -> Call | None:
    tool: Any = {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    }
    choosing: Any = CHOICES[choice] | {"disable_parallel_tool_use": True}
    answer = client.messages.create(
        **asked(WEATHER_QUESTION, CALL_TOKENS), tools=[tool], tool_choice=choosing
    )
    uses = [block for block in answer.content if block.type == "tool_use"]
    return (uses[0].name, uses[0].input) if uses else None


def structured(question: str, max_tokens: int) -> Person | None:
    return client.messages.parse(**asked(question, max_tokens), output_format=Person).parsed_output


def error() -> None:
    client.messages.create(**asked("Hello.", 8) | {"extra_body": {"temperature": -1}})


main(globals())
