"""openai-agents: agents, by chat completions and by responses."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from scenario import (
    CALL_TOKENS,
    CALLED,
    KEY,
    MODEL,
    URL,
    WEATHER_QUESTION,
    Call,
    Person,
    get_weather,
    main,
)

ERROR = openai.BadRequestError
KIND = OpenAIResponsesModel if sys.argv[3:] == ["responses"] else OpenAIChatCompletionsModel
set_tracing_disabled(True)
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


def agent(max_tokens: int, temperature: float = 0, choice: Any = None, **options: Any) -> Any:
    settings = ModelSettings(
        max_tokens=max_tokens,
        temperature=temperature,
        tool_choice=choice,
        parallel_tool_calls=False if "tools" in options else None,
    )
    model = KIND(model=MODEL, openai_client=client)
    return Agent(name="Agent", model=model, model_settings=settings, **options)


def run(agent: Any, question: str) -> Any:
    return loop.run_until_complete(Runner.run(agent, question, max_turns=2)).final_output


def chat(question: str, max_tokens: int) -> str:
    return str(run(agent(max_tokens), question))


def stream(question: str, max_tokens: int) -> Iterator[str]:
    async def pieces() -> AsyncIterator[str]:
        running = Runner.run_streamed(agent(max_tokens), question)
        try:
            async for event in running.stream_events():
                data = event.data if event.type == "raw_response_event" else None
                if data is not None and data.type == "response.output_text.delta":
                    yield data.delta
        finally:
            running.cancel()

    told = pieces()
    try:
        while True:
            yield loop.run_until_complete(anext(told))
    except StopAsyncIteration:
        pass
    finally:
        loop.run_until_complete(told.aclose())
        loop.run_until_complete(asyncio.sleep(0.1))  # for what the agent has cancelled


def call(choice: str) -> Call | None:
    CALLED.clear()
    wanted = "get_weather" if choice == "named" else choice
    tools = [function_tool(get_weather)]
    with contextlib.suppress(MaxTurnsExceeded, ModelBehaviorError):  # a long answer after a call
        run(agent(CALL_TOKENS, choice=wanted, tools=tools), WEATHER_QUESTION)
    return CALLED[0] if CALLED else None


def structured(question: str, max_tokens: int) -> Any:
    """An output type, beside a tool that the question has no use for."""
    tools = [] if MODEL == "demo" else [function_tool(get_weather)]
    return run(agent(max_tokens, output_type=Person, tools=tools), question)


def error() -> None:
    run(agent(8, temperature=-1), "Hello.")


main(globals())
