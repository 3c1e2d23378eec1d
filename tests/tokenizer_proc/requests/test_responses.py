"""A request of `/v1/responses` comes to a chat, and errors name what its client wrote."""

import json
from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types.responses import response_create_params
from planners import HTTP, make_planner

from headrace.errors import RequestError
from headrace.ipc.messages import Api, GenerateRequest, ResponsePlan, ResponsesForm
from headrace.model.sampling_defaults import SamplingDefaults
from headrace.system.cpu_limit import CpuLimit
from headrace.tokenizer_proc.requests.responses import (
    MAX_ECHO_BYTES,
    NOT_READ,
    ResponsesRequest,
    chat_body,
    chat_of_responses,
    decode_responses,
    echo_of,
    messages_of,
)

HI = {"type": "input_text", "text": "Hi"}
IMAGE = {"type": "input_image", "image_url": "data:"}
ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def planned(**fields: Any) -> tuple[str, GenerateRequest, ResponsePlan]:
    """Return the prompt and the one sequence of a request."""
    body = json.dumps({"input": "Hi"} | fields).encode()
    sequences = make_planner(chat_template=ROLES).plan("responses", HTTP, body)
    (request,), (prompt,) = sequences.requests, sequences.prompts
    plan = msgspec.msgpack.decode(request.plan, type=ResponsePlan)
    return bytes(prompt.tolist()).decode(), request, plan


def test_fields_are_a_chats() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 5, "stop": "x", "top_k": 3}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5}
    prompt, request, plan = planned(**fields, **penalties, safety_identifier="me")
    assert prompt == "[user]Hi"
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in penalties} == penalties
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert (request.max_tokens, plan.stop) == (5, ["x"])
    assert request.key != 0
    assert (plan.api, plan.response_id[:5], plan.logprobs) == (Api.RESPONSES, "resp_", None)


def test_logprobs_are_reported_where_they_are_included() -> None:
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    assert planned(include=include)[2].logprobs == 0
    assert planned(include=include, top_logprobs=3)[2].logprobs == 3


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"instructions": "Be kind."}, "[system]Be kind.[user]Hi"),
        (
            {
                "instructions": "Be kind.",
                "input": [
                    {"role": "developer", "content": "Be short."},
                    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "Ho", "annotations": []}],
                    },
                    {"role": "user", "content": "Hm"},
                ],
            },
            "[system]Be kind.\nBe short.[user]Hi[assistant]Ho[user]Hm",
        ),
    ],
)
def test_items_are_messages(fields: dict[str, Any], prompt: str) -> None:
    assert planned(**fields)[0] == prompt


@pytest.mark.parametrize("told", [[], [{"type": "summary_text", "text": "Hm."}]])
def test_thoughts_that_end_an_input_are_a_message(told: list[dict[str, str]]) -> None:
    prompt, _, _ = planned(input=[{"role": "user", "content": "Hi"}, {"type": "reasoning"}])
    assert prompt == "[user]Hi[assistant]"
    thoughts = {"type": "reasoning", "summary": told}
    prompt, _, _ = planned(input=[thoughts, {"role": "user", "content": "Hi"}])
    assert prompt == "[assistant][user]Hi"


def test_a_response_will_repeat_the_request() -> None:
    form = planned(metadata={"a": "b"}, store=True, instructions="Be kind.", top_p=0.5)[2].form
    assert isinstance(form, ResponsesForm)
    echo = json.loads(form.echo)
    told = {name: echo[name] for name in ("metadata", "store", "instructions", "top_p")}
    assert told == {
        "metadata": {"a": "b"},
        "store": False,
        "instructions": "Be kind.",
        "top_p": 0.5,
    }
    assert (echo["temperature"], echo["text"]) == (1.0, {"format": {"type": "text"}})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": []}, "input: must not be empty"),
        ({"input": None}, "input: must be a string or an array, not null"),
        ({"input": [{"role": "user"}]}, "input[0]: a message needs 'role' and 'content'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: 'item_reference' items"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input[0]: this model takes text, not 'input_audio' parts",
        ),
        (
            {"instructions": "Be kind.", "input": [{"role": "user", "content": [HI, IMAGE]}]},
            "input[0].content[1].image_url: this model takes no images",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url: must be there; no files are kept here",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens: must be at least 1, not 0"),
        (
            {"input": "x" * 100, "truncation": "auto"},
            "this model's maximum context length is 100 tokens; the in",
        ),
        ({"top_logprobs": 21}, "top_logprobs: must be between 0 and 20"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: not supported"),
        ({"conversation": "c"}, "conversation: not supported"),
        ({"background": True}, "background: not supported"),
        ({"moderation": {"model": "x"}}, "moderation: not supported"),
        ({"context_management": [{"type": "compaction"}]}, "context_management: not supported"),
        ({"truncation": "left"}, "truncation: must be 'disabled' or 'auto', not 'left'"),
        ({"include": ["file_search_call.results"]}, "include: 'file_search_call.results' is not"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        planned(**fields)
    assert str(refused.value).startswith(says)


def test_every_field_of_openai_s_is_known_or_changes_nothing() -> None:
    theirs = get_type_hints(response_create_params.ResponseCreateParamsBase)
    assert theirs.keys() - {*ResponsesRequest.__struct_fields__} == {*NOT_READ}
    assert planned(**dict.fromkeys(NOT_READ, "x"))[0] == "[user]Hi"


LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


def chat_body_of(**fields: Any) -> Any:
    return chat_body(decode_responses(json.dumps({"input": "Hi"} | fields).encode()))


def test_tools_are_a_chats() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    body = chat_body_of(
        tools=[LOOK],
        tool_choice={"type": "function", "name": "look"},
        input=[
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"role": "assistant", "content": "I look."},
            call,
            call | {"call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "calm"},
            {"role": "assistant", "content": "Calm."},
            {"role": "assistant", "content": "And blue."},
        ],
    )
    assert body["tools"][0]["function"]["name"] == "look"
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    _, said, answered, *rest = body["messages"]
    assert (said["content"], said["reasoning_content"]) == ("I look.", "Hm")
    assert [call["id"] for call in said["tool_calls"]] == ["c1", "c2"]
    assert answered == {"role": "tool", "tool_call_id": "c1", "content": "calm"}
    assert [message["content"] for message in rest] == ["Calm.", "And blue."]


def test_a_call_that_was_cut_off_comes_back_as_it_is() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "s'}
    request = decode_responses(json.dumps({"input": [call]}).encode())
    chat, _ = chat_of_responses(request)
    (called,) = chat.messages[0].tool_calls or ()
    assert called.function is not None
    assert called.function.arguments == '{"at": "s'


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]: 'web_search' is not offered"),
        ({"tools": [{"type": "function"}]}, "tools[0].name: must be there"),
        ({"tools": [LOOK], "tool_choice": {"type": "mcp"}}, "tool_choice: must be 'auto'"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "function", "name": "leap"}},
            "tool_choice.name: 'leap' is none of the tools",
        ),
        ({"tools": [LOOK, LOOK]}, "tools[1].name: 'look' is there already"),
        (
            {"tools": [LOOK | {"parameters": {"type": "array"}}]},
            "tools[0].parameters.type: must be 'object'",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema: must be there",
        ),
        ({"input": [{"type": "function_call"}]}, "input[0]: a call needs 'name' and 'arguments'"),
    ],
)
def test_tools_that_cannot_be_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        planned(**fields)
    assert str(refused.value).startswith(says)


def test_a_format_and_an_effort_are_a_chats() -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    body = chat_body_of(text={"format": wanted}, reasoning={"effort": "none"})
    assert body["response_format"] == {"type": "json_schema", "json_schema": wanted}
    kwargs = {"reasoning_effort": "none", "enable_thinking": False}
    assert body["chat_template_kwargs"] == kwargs


@pytest.mark.parametrize(
    "item",
    [
        {"role": "system", "content": "x"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
    ],
)
def test_items_in_a_row_take_linear_time(item: dict[str, str]) -> None:
    request = msgspec.convert({"input": [item] * 150_000}, ResponsesRequest)
    with CpuLimit(20):
        (message,) = messages_of(request)
    assert len(message.get("tool_calls") or message["content"]) >= 150_000


@pytest.mark.parametrize("name", ["metadata", "user", "prompt_cache_key"])
def test_repeated_fields_are_bounded(name: str) -> None:
    value = "x" * MAX_ECHO_BYTES
    with pytest.raises(RequestError, match=f"^{name}: the fields that responses repeat") as caught:
        planned(**{name: {"a": value} if name == "metadata" else value})
    assert caught.value.param == name


def test_instructions_are_bounded_by_the_context_alone() -> None:
    request = ResponsesRequest(input="x", instructions="x" * MAX_ECHO_BYTES)
    assert len(echo_of(request, SamplingDefaults())) > MAX_ECHO_BYTES
