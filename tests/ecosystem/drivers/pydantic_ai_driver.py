"""pydantic-ai: agents, and single requests of its models, by OpenAI's API and by Anthropic's."""

import sys
from collections.abc import Iterator
from typing import Any

from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolCallPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from scenario import CALL_TOKENS, FUNCTION, KEY, MODEL, URL, WEATHER_QUESTION, Call, Person, main

API = sys.argv[3] if sys.argv[3:] else "chat"
ERROR = ModelHTTPError
TOOL = ToolDefinition(
    name=FUNCTION["name"],
    description=FUNCTION["description"],
    parameters_json_schema=FUNCTION["parameters"],
)


def make_model() -> Any:
    if API == "anthropic":
        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    kind = OpenAIResponsesModel if API == "responses" else OpenAIChatModel
    return kind(MODEL, provider=provider)


model = make_model()


def agent(max_tokens: int, temperature: float = 0, **options: Any) -> Any:
    settings: Any = {"max_tokens": max_tokens, "temperature": temperature}
    return Agent(model, model_settings=settings, **options)


def chat(question: str, max_tokens: int) -> str:
    return str(agent(max_tokens).run_sync(question).output)


def stream(question: str, max_tokens: int) -> Iterator[str]:
    with agent(max_tokens).run_stream_sync(question) as run:
        yield from run.stream_text(delta=True, debounce_by=None)


def call(choice: str) -> Call | None:
    settings: Any = {"max_tokens": CALL_TOKENS, "temperature": 0}
    settings["tool_choice"] = ["get_weather"] if choice == "named" else choice
    answer = model_request_sync(
        model,
        [ModelRequest.user_text_prompt(WEATHER_QUESTION)],
        model_settings=settings,
        model_request_parameters=ModelRequestParameters(function_tools=[TOOL]),
    )
    calls = [part for part in answer.parts if isinstance(part, ToolCallPart)]
    return (calls[0].tool_name, calls[0].args_as_dict()) if calls else None


def structured(question: str, max_tokens: int) -> Any:
    wanted: Any = Person if API == "anthropic" else NativeOutput(Person)  # a tool, or a format
    return agent(max_tokens, output_type=wanted).run_sync(question).output


def error() -> None:
    agent(8, temperature=-1).run_sync("Hello.")


main(globals())
