"""A request of `/v1/messages` comes to a chat, and errors name what its client wrote."""

import json
from typing import Any, get_type_hints

import msgspec
import pytest
from planners import HTTP, make_planner

from headrace.errors import RequestError
from headrace.ipc.messages import Api, GenerateRequest, ResponsePlan
from headrace.response_bodies.errors import anthropic_error
from headrace.tokenizer_proc.jobs.stages import ImmediateResponse
from headrace.tokenizer_proc.requests.anthropic import (
    NOT_READ,
    MessagesRequest,
    chat_body,
    decode_messages,
)

HI = [{"role": "user", "content": "Hi"}]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def body_of(**fields: Any) -> bytes:
    return json.dumps({"messages": HI, "max_tokens": 5} | fields).encode()


def planned(**fields: Any) -> tuple[bytes, GenerateRequest, ResponsePlan]:
    """Return the prompt and the one sequence of a request."""
    sequences = make_planner().plan("messages", HTTP, body_of(**fields))
    (request,), (prompt,) = sequences.requests, sequences.prompts
    return bytes(prompt.tolist()), request, msgspec.msgpack.decode(request.plan, type=ResponsePlan)


def test_fields_are_a_chats() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["a", "b"]}
    prompt, request, plan = planned(**fields, metadata={"user_id": "me"})
    assert prompt == b"Hi:"
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (request.max_tokens, plan.stop) == (5, ["a", "b"])
    assert request.key != 0
    assert (plan.api, plan.response_id[:4]) == (Api.MESSAGES, "msg_")


def test_every_event_of_a_stream_may_have_usage() -> None:
    _, _, plan = planned(stream=True)
    assert (plan.stream, plan.continuous_usage) == (True, True)
    assert not planned()[2].stream


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"system": "Be kind."}, b"Be kind.Hi:"),
        ({"system": [part("Be"), part("kind")]}, b"Be\nkindHi:"),
        ({"messages": [*HI, {"role": "user", "content": [part("you")]}]}, b"Hi\nyou:"),
        ({"messages": [*HI, {"role": "assistant", "content": "Hel"}]}, b"HiHel"),
    ],
)
def test_a_conversation_is_what_the_template_makes_of_it(
    fields: dict[str, Any], prompt: bytes
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}:{% endif %}"
    assert planned_with(template, **fields) == prompt


def planned_with(template: str, **fields: Any) -> bytes:
    planner = make_planner(chat_template=template)
    (prompt,) = planner.plan("messages", HTTP, body_of(**fields)).prompts
    return bytes(prompt.tolist())


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens: must be an integer, not null"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, not 0"),
        (
            {"messages": [{"role": "user", "content": "x" * 100}]},
            "this model's maximum context length is 100 tokens; the messages have",
        ),
        ({"messages": []}, "messages: must have at least one message"),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            "messages[0].role: must be 'assistant', 'system' or 'user', not 'robot'",
        ),
        ({"stop_sequences": [""]}, "stop_sequences: must be at most 32 strings"),
        ({"temperature": -1}, "temperature: must be at least 0, not -1"),
        ({"container": "x"}, "container: not supported by this server"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].source: this model takes no images",
        ),
        ({"system": [IMAGE]}, "system: this model takes text, not 'image' parts"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        planned(**fields)
    assert str(refused.value).startswith(says)


def test_every_field_of_anthropic_s_is_known_or_changes_nothing() -> None:
    from anthropic.types import message_create_params  # takes seconds

    theirs = get_type_hints(message_create_params.MessageCreateParamsBase)
    assert theirs.keys() - {*MessagesRequest.__struct_fields__} == {*NOT_READ}
    assert planned(**dict.fromkeys(NOT_READ, "x"))[0] == b"Hi:"


def test_an_error_in_anthropics_words() -> None:
    with pytest.raises(RequestError) as refused:
        planned(model="other")
    assert msgspec.to_builtins(anthropic_error(refused.value)) == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "the model 'other' does not exist; this server has 'tiny'",
        },
    }


def test_tokens_are_counted_without_a_limit() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 500}]}).encode()
    answer = make_planner().handle("count_tokens", HTTP, body)
    assert isinstance(answer, ImmediateResponse)
    assert json.loads(answer.body) == {"input_tokens": 501}


USE = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "sea"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [part("calm")]}
LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


SEALED = {"type": "redacted_thinking", "data": "x"}


def chat_body_of(**fields: Any) -> Any:
    return chat_body(decode_messages(body_of(**fields)))


def test_tools_are_a_chats() -> None:
    body = chat_body_of(
        tools=[LOOK],
        tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        messages=[
            *HI,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, SEALED, USE]},
            {"role": "user", "content": [RESULT, part("So?")]},
        ],
    )
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    (tool,) = body["tools"]
    assert tool["function"].items() >= function.items()
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert body["parallel_tool_calls"] is False
    _, said, answered, asked = body["messages"]
    (call,) = said["tool_calls"]
    assert (said["role"], said["reasoning_content"]) == ("assistant", "Hm")
    assert (call["id"], call["function"]["name"]) == ("call_1", "look")
    assert json.loads(call["function"]["arguments"]) == {"at": "sea"}
    assert answered == {"role": "tool", "tool_call_id": "call_1", "content": "calm"}
    assert asked == {"role": "user", "content": "So?"}


@pytest.mark.parametrize(
    ("choice", "wanted"), [("auto", "auto"), ("any", "required"), ("none", "none")]
)
def test_a_choice_of_tools_is_a_chats(choice: str, wanted: str) -> None:
    assert chat_body_of(tools=[LOOK], tool_choice={"type": choice})["tool_choice"] == wanted


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": [LOOK | {"type": "web_search_20250305"}]}, "tools[0]: 'web_search_20250305' is"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name: must be there"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "leap"}},
            "tool_choice.name: 'leap' is none of the tools",
        ),
        ({"tools": [LOOK, LOOK | {"name": "no way"}]}, "tools[1].name: must be 1 to 64 of"),
        (
            {"tools": [LOOK | {"input_schema": {"type": "array"}}]},
            "tools[0].input_schema.type: must be 'object'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0]: a tool_use block needs 'name' and 'input'",
        ),
    ],
)
def test_tools_that_cannot_be_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        planned(**fields)
    assert str(refused.value).startswith(says)


def test_thoughts_may_be_omitted() -> None:
    body = chat_body_of(thinking={"type": "adaptive", "display": "omitted"})
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert body["include_reasoning"] is False


def test_thinking_is_the_templates_and_format_the_grammars() -> None:
    schema = {"type": "object"}
    output = {"format": {"type": "json_schema", "schema": schema}}
    body = chat_body_of(thinking={"type": "disabled"}, output_config=output)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["include_reasoning"]
    assert body["response_format"]["json_schema"]["schema"] == schema
