"""Tools are checked by field, reach the template, and say what an answer is read for."""

import json
from typing import Any

import msgspec
import pytest
from planners import HTTP, Planner, make_planner

from headrace.errors import InvalidBody, InvalidValue, RequestError, Unsupported
from headrace.ipc.messages import Parsing, ResponsePlan
from headrace.model.output_formats import ThoughtFormat, ToolFormat
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.requests.openai import decode_chat, decode_tokenize

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
THINKING = TEMPLATE + "{{ '<think>' if enable_thinking else '<think></think>' }}"


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}]} | fields).encode()


def planner(template: str = TEMPLATE, **fields: Any) -> Planner:
    formats = {"tool_format": ToolFormat.HERMES} | fields
    return make_planner(max_model_len=2000, chat_template=template, **formats)


def plan(planner: Planner, **fields: Any) -> tuple[str, Parsing | None]:
    """Return the prompt of a request, and what its answer is read for."""
    sequences = planner.plan("chat", HTTP, body(**fields))
    response = msgspec.msgpack.decode(sequences.requests[0].plan, type=ResponsePlan)
    return bytes(sequences.prompts[0].tolist()).decode(), response.parsing


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name", "1 to 64 of a-z"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "name", "1 to 64"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "'now' is there already"),
        ({"tools": [NOW] * 129}, "tools", "at most 128 entries, not 129"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "description": "x" * 300_000}}
                ]
            },
            "tools",
            "at most 262144 bytes",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters.type",
            "must be 'object'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there must be 'tools'"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
            "'f' is none of the tools",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_said_by_field(
    fields: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        decode_chat(body(**fields))
    assert param in str(refused.value.param)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [NOW], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_what_is_no_tool_is_said_by_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidBody) as refused:
        decode_chat(body(**fields))
    assert refused.value.param == param


def test_the_template_is_given_the_tools_as_they_came() -> None:
    prompt, parsing = plan(planner(), tools=[WEATHER, NOW])
    assert prompt == json.dumps([WEATHER, NOW]) + "Hi"
    assert parsing == Parsing(tools=ToolFormat.HERMES)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_an_answer_is_words(fields: dict[str, Any]) -> None:
    assert plan(planner(), **fields) == ("nullHi", None)


def test_template_without_tools_refuses_them_unless_none_chosen() -> None:
    without = planner("{{ messages[0].content }}")
    with pytest.raises(Unsupported, match=r"^tools: the chat template has no place") as refused:
        plan(without, tools=[NOW])
    assert refused.value.param == "tools"
    assert plan(without, tools=[NOW], tool_choice="none") == ("Hi", None)


def test_documents_are_for_templates_that_know_them() -> None:
    documents = [{"title": "a", "text": "b"}]
    assert plan(planner("{{ documents | tojson }}"), documents=documents)[0] == json.dumps(
        documents
    )
    with pytest.raises(Unsupported, match=r"^documents: the chat template has no place"):
        plan(planner(), documents=documents)


def test_a_model_whose_calls_are_not_known_refuses_tools() -> None:
    with pytest.raises(Unsupported, match=r"^tools: .*--tool-call-parser") as refused:
        plan(planner(tool_format=None), tools=[NOW])
    assert refused.value.param == "tools"


def test_one_call_is_returned_without_parallel_calls() -> None:
    _, parsing = plan(planner(), tools=[NOW], parallel_tool_calls=False)
    assert parsing == Parsing(tools=ToolFormat.HERMES, has_one_call=True)


def test_strings_are_known_where_calls_do_not_say_what_is_one() -> None:
    _, parsing = plan(planner(tool_format=ToolFormat.QWEN3_CODER), tools=[WEATHER, NOW])
    assert parsing is not None
    assert parsing.string_parameters == {"get_weather": ["city"], "now": []}


def test_thoughts_begin_in_the_prompt_or_have_ended_there() -> None:
    thinking = planner(THINKING, thought_format=ThoughtFormat.QWEN3)
    _, parsing = plan(thinking, chat_template_kwargs={"enable_thinking": True})
    assert parsing == Parsing(thoughts=ThoughtFormat.QWEN3, begins_inside=True)
    assert plan(thinking, chat_template_kwargs={"enable_thinking": False})[1] is None


def test_thoughts_can_be_kept_back() -> None:
    thinking = planner(thought_format=ThoughtFormat.QWEN3)
    _, parsing = plan(thinking, include_reasoning=False)
    assert parsing == Parsing(thoughts=ThoughtFormat.QWEN3, hides_thoughts=True)


def test_effort_is_up_to_the_template() -> None:
    prompt, _ = plan(planner("{{ reasoning_effort }}"), reasoning_effort="low")
    assert prompt == "low"


def test_a_text_is_counted_with_its_tools() -> None:
    request = decode_tokenize(body(tools=[NOW]))
    assert ChatTemplate(TEMPLATE, {}).render(request) == json.dumps([NOW]) + "Hi"


def test_a_text_is_counted_with_its_custom_tools() -> None:
    custom = {"type": "custom", "custom": {"name": "run"}}
    prompt, _ = plan(planner(), tools=[custom])
    request = decode_tokenize(body(tools=[custom]))
    assert ChatTemplate(TEMPLATE, {}).render(request) == prompt


@pytest.mark.parametrize("tool", [{"function": {"name": "f"}}, {**NOW, "function": {"name": "?"}}])
def test_a_text_is_not_counted_with_what_is_no_tool(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        decode_chat(body(tools=[tool]))
    with pytest.raises(RequestError):
        decode_tokenize(body(tools=[tool]))


def grammar(**fields: Any) -> str:
    """Return the grammar of an answer."""
    sequences = planner().plan("chat", HTTP, body(tools=[WEATHER, NOW], **fields))
    return sequences.requests[0].grammar.decode()


ONE = {"type": "function", "function": {"name": "now"}}


def test_a_call_that_is_demanded_is_a_grammar() -> None:
    assert grammar() == grammar(tool_choice="auto") == grammar(tool_choice="none") == ""
    required, named = grammar(tool_choice="required"), grammar(tool_choice=ONE)
    assert required.startswith("tool_choice: start: ")
    assert "get_weather" in required
    assert "get_weather" not in named
    assert ")*" in required
    assert ")*" not in named
    assert ")*" not in grammar(tool_choice="required", parallel_tool_calls=False)


@pytest.mark.parametrize("choice", ["required", ONE])
def test_a_demanded_call_sets_the_format_aside(choice: Any) -> None:
    alone, beside = grammar(tool_choice=choice), {"response_format": {"type": "json_object"}}
    assert grammar(tool_choice=choice, **beside) == alone


def test_a_format_holds_answers_and_leaves_calls_free() -> None:
    beside: Any = {"response_format": {"type": "json_object"}}
    assert grammar(**beside).startswith("response_format: start: ")
    assert "get_weather" in grammar(**beside)
    assert ")*" in grammar(**beside)
    assert ")*" not in grammar(**beside, parallel_tool_calls=False)
    assert "get_weather" not in grammar(**beside, tool_choice="none")
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
    assert "get_weather" not in grammar(response_format=tag)


def test_a_demand_that_is_too_large_is_refused() -> None:
    large = {"name": "f", "parameters": {"type": "object", "title": "x" * (130 << 10)}}
    with pytest.raises(InvalidValue, match="131072 characters") as refused:
        plan(planner(), tools=[{"type": "function", "function": large}], tool_choice="required")
    assert refused.value.param == "tools"


# Conversations with calls in them

CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "Hm",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    ],
}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "7"}
SHOWN = (
    "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|"
    "{{ m.tool_call_id }}|"
    "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}({{ ARGUMENTS }}){% endfor %}"
    ";{% endfor %}"
)


def rendered(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(source, {}).render(decode_chat(body(messages=list(messages))))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("c.function.arguments | tojson", '{"a": "é"}'),
        ("c.function.arguments.a", "é"),
        ("'' + c.function.arguments", '{"a": "é"}'),  # DeepSeek's want a string
    ],
)
def test_calls_and_their_results_are_rendered(arguments: str, shown: str) -> None:
    text = rendered(SHOWN.replace("ARGUMENTS", arguments), CALLED, ANSWERED)
    assert text == f"assistant|None|Hm||c1:f({shown});tool|7||c1|;"


def test_thoughts_have_either_name() -> None:
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].reasoning }}"
    said = {"role": "assistant", "content": ""}
    for thoughts in ({"reasoning": "Hm"}, {"reasoning_content": "Hm"}):
        assert rendered(source, said | thoughts) == "Hm|Hm"
    assert rendered(source, said | {"reasoning": "a", "reasoning_content": "b"}) == "b|b"


@pytest.mark.parametrize("arguments", ["", "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: object) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert rendered(source, {"role": "assistant", "tool_calls": [call]}) == "{}"


CUT_OFF = '{"city": "Par'


@pytest.mark.parametrize("arguments", [CUT_OFF, "{", "[1]", '"x"', "null", "[" * 100_000])
def test_arguments_that_are_no_object_stay_a_text(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert rendered(source, {"role": "assistant", "tool_calls": [call]}) == arguments


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("c.function.arguments | tojson", '"{\\"city\\": \\"Par"'),
        ("'' + c.function.arguments", CUT_OFF),
        ("c.function.arguments.items() | list", "[]"),
        ("c.function.arguments | items | list", "[]"),
        ("c.function.arguments.city | upper", ""),
    ],
)
def test_a_call_that_was_cut_off_fails_no_template(form: str, shown: str) -> None:
    cut_off = {"function": {"name": "g", "arguments": CUT_OFF}, "id": "c2"}
    called = {"role": "assistant", "content": "", "tool_calls": [cut_off]}
    text = rendered(SHOWN.replace("ARGUMENTS", form), called)
    assert f"c2:g({shown})" in text
    both = {**called, "tool_calls": [*CALLED["tool_calls"], cut_off]}
    text = rendered(SHOWN.replace("ARGUMENTS", form), both)
    assert f"c2:g({shown})" in text
    assert "c1:f(" in text


def test_a_templates_own_refusal_of_calls_is_reported() -> None:
    cut_off = {"function": {"name": "g", "arguments": CUT_OFF}}
    with pytest.raises(InvalidValue, match="no calls here"):
        rendered("{{ raise_exception('no calls here') }}", {"role": "user", "content": "Hi"})
    with pytest.raises(InvalidValue, match="no calls here"):
        rendered(
            "{{ raise_exception('no calls here') }}",
            {"role": "assistant", "content": "", "tool_calls": [cut_off]},
        )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": None, "tool_calls": CALLED["tool_calls"]},
        {"role": "tool", "tool_call_id": "c1"},
    ],
)
def test_only_calls_need_no_content(message: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content: "):
        rendered("x", message)


def test_qwens_template_is_given_what_transformers_gives_it() -> None:
    import transformers

    source = (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}'
        "{{ c.function.arguments | tojson }}}{% endfor %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}{{ documents is none }}"
    )
    messages = [{"role": "user", "content": "Hi"}, CALLED, ANSWERED]
    request = decode_chat(body(messages=messages, tools=[WEATHER]))
    as_objects = json.loads(json.dumps(messages))
    as_objects[1]["tool_calls"][0]["function"]["arguments"] = {"a": "é"}
    expected, _ = transformers.utils.chat_template_utils.render_jinja_template(
        [as_objects], tools=[WEATHER], chat_template=source, add_generation_prompt=True
    )
    assert ChatTemplate(source, {}).render(request) == expected[0]
