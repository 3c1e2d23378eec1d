"""openai: chat completions."""

import json
from collections.abc import Iterator
from typing import Any

import openai
from scenario import (
    CALL_TOKENS,
    KEY,
    MODEL,
    NAMED,
    TOOL,
    URL,
    WEATHER_QUESTION,
    Call,
    Person,
    main,
)

ERROR = openai.BadRequestError
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


def asked(question: str, max_tokens: int) -> Any:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


def chat(question: str, max_tokens: int) -> str:
    answer = client.chat.completions.create(**asked(question, max_tokens))
    return answer.choices[0].message.content or ""


def stream(question: str, max_tokens: int) -> Iterator[str]:
    with client.chat.completions.create(**asked(question, max_tokens), stream=True) as chunks:
        for chunk in chunks:
            yield chunk.choices[0].delta.content or ""


def call(choice: str) -> Call | None:
    answer = client.chat.completions.create(
        **asked(WEATHER_QUESTION, CALL_TOKENS),
        tools=[TOOL],
        tool_choice=NAMED if choice == "named" else choice,
        parallel_tool_calls=False,
    )
    calls = answer.choices[0].message.tool_calls
    return (calls[0].function.name, json.loads(calls[0].function.arguments)) if calls else None


def structured(question: str, max_tokens: int) -> Person | None:
    answer = client.chat.completions.parse(**asked(question, max_tokens), response_format=Person)
    return answer.choices[0].message.parsed


def error() -> None:
    client.chat.completions.create(**asked("Hello.", 8) | {"temperature": -1})


main(globals())
