"""langchain: its models of OpenAI's API and of Anthropic's, and the agent that runs them."""

import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from scenario import (
    CALL_TOKENS,
    CALLED,
    KEY,
    MODEL,
    TOOL,
    URL,
    WEATHER_QUESTION,
    Call,
    Person,
    get_weather,
    main,
)

IS_ANTHROPIC = sys.argv[3:] == ["anthropic"]
ERROR = anthropic.BadRequestError if IS_ANTHROPIC else openai.BadRequestError


def model(max_tokens: int, temperature: float = 0) -> Any:
    told: Any = {"model": MODEL, "api_key": KEY, "max_tokens": max_tokens, "max_retries": 0}
    told |= {"temperature": temperature}
    if IS_ANTHROPIC:
        return ChatAnthropic(base_url=URL, **told)
    return ChatOpenAI(base_url=f"{URL}/v1", **told)


def chat(question: str, max_tokens: int) -> str:
    return str(model(max_tokens).invoke(question).text)


def stream(question: str, max_tokens: int) -> Iterator[str]:
    chunks = model(max_tokens).stream(question)
    try:
        for chunk in chunks:
            yield str(chunk.text)
    finally:
        chunks.close()


def call(choice: str) -> Call | None:
    if choice == "auto":
        CALLED.clear()
        agent = create_agent(model(CALL_TOKENS), [get_weather])
        agent.invoke({"messages": [("user", WEATHER_QUESTION)]}, {"recursion_limit": 6})
        return CALLED[0] if CALLED else None
    wanted = {"required": "any", "named": "get_weather"}[choice]
    bound = model(CALL_TOKENS).bind_tools([TOOL], tool_choice=wanted, parallel_tool_calls=False)
    calls = bound.invoke(WEATHER_QUESTION).tool_calls
    return (calls[0]["name"], calls[0]["args"]) if calls else None


def structured(question: str, max_tokens: int) -> Any:
    return model(max_tokens).with_structured_output(Person, method="json_schema").invoke(question)


def error() -> None:
    model(8, temperature=-1).invoke("Hello.")


main(globals())
