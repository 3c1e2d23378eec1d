"""openai: responses."""

import json
from collections.abc import Iterator
from typing import Any

import openai
from scenario import CALL_TOKENS, FUNCTION, KEY, MODEL, URL, WEATHER_QUESTION, Call, Person, main

ERROR = openai.BadRequestError
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


def asked(question: str, max_tokens: int) -> Any:
    return {"model": MODEL, "input": question, "max_output_tokens": max_tokens, "temperature": 0}


def chat(question: str, max_tokens: int) -> str:
    return client.responses.create(**asked(question, max_tokens)).output_text


def stream(question: str, max_tokens: int) -> Iterator[str]:
    with client.responses.create(**asked(question, max_tokens), stream=True) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                yield event.delta


def call(choice: str) -> Call | None:
    named = {"type": "function", "name": FUNCTION["name"]}
    answer = client.responses.create(
        **asked(WEATHER_QUESTION, CALL_TOKENS),
        tools=[{"type": "function", **FUNCTION}],
        tool_choice=named if choice == "named" else choice,
        parallel_tool_calls=False,
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    return (calls[0].name, json.loads(calls[0].arguments)) if calls else None


def structured(question: str, max_tokens: int) -> Person | None:
    return client.responses.parse(**asked(question, max_tokens), text_format=Person).output_parsed


def error() -> None:
    client.responses.create(**asked("Hello.", 16) | {"temperature": -1})


main(globals())
