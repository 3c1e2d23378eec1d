"""Clients that people have already: they are told a URL, and nothing else."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from embedding_models import TEXTS, minilm
from pydantic import BaseModel, Field
from servers import RunningServer
from weather_tool import TEMPLATE, WEATHER, check_weather

pytestmark = pytest.mark.filterwarnings("default")  # they are not ours

litellm = pytest.importorskip("litellm", reason="make ecosystem")
langchain_openai = pytest.importorskip("langchain_openai", reason="make ecosystem")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "demo"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer("--served-model-name", MODEL, "--dtype", "float32")
    yield running
    assert running.stop() == 0


@pytest.fixture
def to_server(server: RunningServer) -> dict[str, Any]:
    """What litellm is told of every request."""
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "-",
        "temperature": 0,
        "max_tokens": 12,
    }


def test_litellm_whole_and_streamed(to_server: dict[str, Any]) -> None:
    whole = litellm.completion(messages=QUESTION, **to_server)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.completion_tokens > 0
    pieces = litellm.completion(messages=QUESTION, stream=True, **to_server)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text


async def test_litellm_async(to_server: dict[str, Any]) -> None:
    answers = await asyncio.gather(
        *(litellm.acompletion(messages=QUESTION, **to_server) for _ in range(4))
    )
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_litellm_completes_texts(to_server: dict[str, Any]) -> None:
    to_server["model"] = f"text-completion-openai/{MODEL}"
    answer = litellm.text_completion(prompt="The capital of France is", **to_server)
    assert "Paris" in answer.choices[0].text


def test_litellm_reads_our_errors(to_server: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature: must be"):
        litellm.completion(messages=QUESTION, **(to_server | {"temperature": -1}))


def chat(server: RunningServer, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="-",
        model=MODEL,
        temperature=0,
        max_completion_tokens=12,
        **options,
    )


def test_langchain_whole_and_streamed(server: RunningServer) -> None:
    model = chat(server, stream_usage=True)
    whole = model.invoke("What is the capital of France?")
    assert "Paris" in whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    pieces = list(model.stream("What is the capital of France?"))
    assert "".join(piece.content for piece in pieces) == whole.content
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata)


async def test_langchain_async(server: RunningServer) -> None:
    answers = await chat(server).abatch(["What is 2 + 2?", "What is the capital of France?"])
    assert "Paris" in answers[1].content


def test_langchain_log_probabilities(server: RunningServer) -> None:
    answer = chat(server, logprobs=True, top_logprobs=2).invoke("What is the capital of France?")
    told = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in told) == answer.content
    assert all(len(token["top_logprobs"]) == 2 for token in told)


# Tools and structured output. The demo model calls tools only where it has to


class Person(BaseModel, extra="forbid"):
    """The subject of the answer."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


NAME = "get_weather"
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "Person", "schema": Person.model_json_schema()},
}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    running = RunningServer(
        *("--served-model-name", MODEL, "--chat-template", str(template)),
        *("--tool-call-parser", "hermes", "--reasoning-parser", "none"),
    )
    yield running
    assert running.stop() == 0


@pytest.fixture
def to_tools(tools: RunningServer) -> dict[str, Any]:
    """What litellm is told of every request with tools."""
    told: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{tools.url}/v1"}
    return told | {"api_key": "-", "temperature": 0}


def chat_with_tools(tools: RunningServer) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{tools.url}/v1", api_key="-", model=MODEL, temperature=0, max_tokens=150
    )


def test_langchain_has_structured_output(tools: RunningServer) -> None:
    model = chat_with_tools(tools).with_structured_output(Person, method="json_schema")
    assert isinstance(model.invoke("Describe Ada."), Person)
    whole = list(model.stream("Describe Ada."))[-1]
    assert isinstance(whole, Person)


@pytest.mark.parametrize("choice", [NAME, "any", "required", True])
def test_langchain_calls_tools_and_goes_on(tools: RunningServer, choice: Any) -> None:
    model = chat_with_tools(tools)
    bound = model.bind_tools([WEATHER], tool_choice=choice, parallel_tool_calls=False)
    asked = [("user", "What is the weather in Oslo?")]
    answer = bound.invoke(asked)
    (call,) = answer.tool_calls
    assert call["name"] == NAME
    check_weather(json.dumps(call["args"]))
    assert not answer.invalid_tool_calls
    result = {"role": "tool", "tool_call_id": call["id"], "content": "7 degrees, rain"}
    after = model.bind_tools([WEATHER]).invoke([*asked, answer, result])
    told = [one.usage_metadata["input_tokens"] for one in (answer, after)]
    assert told[1] > told[0]


def test_langchain_streams_a_call(tools: RunningServer) -> None:
    bound = chat_with_tools(tools).bind_tools(
        [WEATHER], tool_choice=NAME, parallel_tool_calls=False
    )
    question = "What is the weather in Oslo?"
    pieces = list(bound.stream(question))
    assert sum(bool(piece.tool_call_chunks) for piece in pieces) > 3
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    (streamed,), (told,) = whole.tool_calls, bound.invoke(question).tool_calls
    assert (streamed["name"], streamed["args"]) == (told["name"], told["args"])


def test_litellm_calls_tools_whole_and_streamed(to_tools: dict[str, Any]) -> None:
    asked = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": "required", **to_tools}
    asked |= {"parallel_tool_calls": False, "max_tokens": 150}
    answer = litellm.completion(**asked).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, call.function.name) == ("tool_calls", NAME)
    check_weather(call.function.arguments)
    pieces = list(litellm.completion(stream=True, **asked))
    streamed = litellm.stream_chunk_builder(pieces).choices[0].message.tool_calls[0].function
    assert (streamed.name, streamed.arguments) == (NAME, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees, rain"}
    goes_on = {"messages": [*QUESTION, answer.message, result], "tool_choice": "none"}
    after = litellm.completion(**(asked | goes_on))
    assert not after.choices[0].message.tool_calls


def test_litellm_has_structured_output(to_tools: dict[str, Any]) -> None:
    asked = {"messages": QUESTION, "max_tokens": 150, "response_format": SCHEMA}
    answer = litellm.completion(**asked, **to_tools)
    Person.model_validate_json(answer.choices[0].message.content)


def test_litellm_speaks_anthropics_api(tools: RunningServer) -> None:
    answer = litellm.completion(
        model=f"anthropic/{MODEL}",
        api_base=tools.url,
        api_key="-",
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": NAME}},
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=150,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", NAME)
    check_weather(call.function.arguments)


async def test_litellm_has_anthropics_messages(tools: RunningServer) -> None:
    tool = {"name": NAME, "input_schema": WEATHER["function"]["parameters"]}
    answer = await litellm.anthropic.messages.acreate(
        model=f"anthropic/{MODEL}",
        api_base=tools.url,
        api_key="-",
        messages=QUESTION,
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=150,
    )
    (use,) = answer["content"]
    assert (answer["stop_reason"], use["name"]) == ("tool_use", NAME)
    check_weather(json.dumps(use["input"]))


def test_litellm_has_responses(to_tools: dict[str, Any]) -> None:
    tool = {"type": "function"} | WEATHER["function"]
    asked = {"input": QUESTION, "tools": [tool], "parallel_tool_calls": False, **to_tools}
    asked |= {"tool_choice": "required", "max_output_tokens": 150}
    (call,) = litellm.responses(**asked).output
    assert (call.type, call.name) == ("function_call", NAME)
    check_weather(call.arguments)
    *_, last = litellm.responses(stream=True, **asked)
    (streamed,) = last.response.output
    assert (streamed.name, streamed.arguments) == (NAME, call.arguments)


def test_litellm_embeds() -> None:
    server = RunningServer(str(minilm()), "--served-model-name", "minilm")
    try:
        answer = litellm.embedding(
            model="openai/minilm", input=TEXTS, api_base=f"{server.url}/v1", api_key="-"
        )
    finally:
        assert server.stop() == 0
    vectors = np.array([one["embedding"] for one in answer.data])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    assert len(vectors) == len(TEXTS)
