"""An agent with the demo model, whose template has no tools, and a format beside the tools."""

import json
from typing import Any

import anthropic
import httpx
import openai
from servers import RunningServer
from weather_tool import WEATHER, check_weather

MODEL = "SmolLM2-135M-Instruct"
TIMEOUT_S = 300
QUESTION: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
REPORT: Any = {
    "type": "object",
    "properties": {"degrees": {"type": "integer", "minimum": -99, "maximum": 99}},
    "required": ["degrees"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT}}


def check_report(text: str) -> None:
    """Check that an answer follows the schema."""
    assert json.loads(text).keys() == {"degrees"}


def test_an_agent_calls_and_then_answers_in_a_schema(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        fields: Any = {"model": MODEL, "tools": [WEATHER], "max_tokens": 150, "seed": 1}
        fields |= {"response_format": FORMAT, "parallel_tool_calls": False}
        answer = client.chat.completions.create(
            messages=QUESTION, tool_choice="required", **fields
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        check_weather(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees, rain"}
        said = [*QUESTION, answer.message.model_dump(exclude_none=True), result]
        last = client.chat.completions.create(messages=said, tool_choice="none", **fields)
        check_report(last.choices[0].message.content)
        for seed in range(3):
            fields |= {"seed": seed, "temperature": 1}
            free = client.chat.completions.create(messages=said, **fields).choices[0]
            if free.finish_reason == "tool_calls":
                check_weather(free.message.tool_calls[0].function.arguments)
            else:
                check_report(free.message.content)


def test_responses_set_the_format_aside_for_a_call(server: RunningServer) -> None:
    body = {
        "input": "What is the weather in Oslo?",
        "tools": [{"type": "function", **WEATHER["function"]}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "report", "schema": REPORT}},
        "max_output_tokens": 150,
    }
    response = httpx.post(f"{server.url}/v1/responses", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200
    (call,) = response.json()["output"]
    assert call["type"] == "function_call"
    check_weather(call["arguments"])


def test_messages_set_the_format_aside_for_a_call(server: RunningServer) -> None:
    function = WEATHER["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        message = client.messages.create(
            model=MODEL,
            max_tokens=150,
            messages=QUESTION,
            tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": REPORT}}},
        )
    (block,) = message.content
    assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
    check_weather(json.dumps(block.input))


def test_the_generic_format_is_logged_once(server: RunningServer) -> None:
    assert server.log.count("the chat template has no place for tools") == 1
