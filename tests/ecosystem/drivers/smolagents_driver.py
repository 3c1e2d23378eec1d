"""smolagents: its model of OpenAI's API, as its agents use it."""

import json
from collections.abc import Iterator
from typing import Any

import openai
from scenario import (
    CALL_TOKENS,
    KEY,
    MODEL,
    NAMED,
    URL,
    WEATHER_QUESTION,
    Call,
    Person,
    get_weather,
    main,
)
from smolagents import ChatMessage, OpenAIModel, tool

ERROR = openai.BadRequestError
OPEN_SCHEMA = True  # the schema that the client writes has no additionalProperties
weather_tool = tool(get_weather)


def model(max_tokens: int, temperature: float = 0) -> OpenAIModel:
    told: Any = {"api_base": f"{URL}/v1", "api_key": KEY, "client_kwargs": {"max_retries": 0}}
    told |= {"retry": False, "max_tokens": max_tokens, "temperature": temperature}
    return OpenAIModel(MODEL, **told)


def messages(question: str) -> list[Any]:
    return [ChatMessage(role="user", content=[{"type": "text", "text": question}])]


def chat(question: str, max_tokens: int) -> str:
    return str(model(max_tokens).generate(messages(question)).content)


def stream(question: str, max_tokens: int) -> Iterator[str]:
    for piece in model(max_tokens).generate_stream(messages(question)):
        yield piece.content or ""


def call(choice: str) -> Call | None:
    asked: Any = {"tool_choice": NAMED if choice == "named" else choice}
    asked |= {"tools_to_call_from": [weather_tool]}
    calls = model(CALL_TOKENS).generate(messages(WEATHER_QUESTION), **asked).tool_calls
    if not calls:
        return None
    function = calls[0].function
    given = function.arguments
    return function.name, json.loads(given) if isinstance(given, str) else given


def structured(question: str, max_tokens: int) -> Any:
    schema = {"name": "Person", "schema": Person.model_json_schema()}
    wanted: Any = {"type": "json_schema", "json_schema": schema}
    answer = model(max_tokens).generate(messages(question), response_format=wanted)
    return json.loads(str(answer.content))


def error() -> None:
    model(8, temperature=-1).generate(messages("Hello."))


main(globals())
