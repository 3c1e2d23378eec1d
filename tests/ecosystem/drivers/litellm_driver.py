"""litellm: as a client of OpenAI's API."""

import json
from collections.abc import Iterator
from typing import Any

import litellm
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

ERROR = litellm.BadRequestError


def ask(question: str, max_tokens: int, **fields: Any) -> Any:
    asked: Any = {
        "model": f"openai/{MODEL}",
        "api_base": f"{URL}/v1",
        "api_key": KEY,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "num_retries": 0,
    }
    return litellm.completion(**asked | fields)


def chat(question: str, max_tokens: int) -> str:
    return ask(question, max_tokens).choices[0].message.content or ""


def stream(question: str, max_tokens: int) -> Iterator[str]:
    chunks = ask(question, max_tokens, stream=True)
    try:
        for chunk in chunks:
            yield chunk.choices[0].delta.content or ""
    finally:
        chunks.completion_stream.close()


def call(choice: str) -> Call | None:
    answer = ask(
        WEATHER_QUESTION,
        CALL_TOKENS,
        tools=[TOOL],
        tool_choice=NAMED if choice == "named" else choice,
        parallel_tool_calls=False,
    )
    calls = answer.choices[0].message.tool_calls
    return (calls[0].function.name, json.loads(calls[0].function.arguments)) if calls else None


def structured(question: str, max_tokens: int) -> Any:
    answer = ask(question, max_tokens, response_format=Person)
    return json.loads(answer.choices[0].message.content)


def error() -> None:
    ask("Hello.", 8, temperature=-1)


main(globals())
