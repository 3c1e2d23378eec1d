"""Families whose folders have no chat template get one of Headrace's, as their own code writes."""

from typing import Any

import msgspec
import pytest
from image_parts import image_part
from model_outputs import in_tags

from headrace.errors import InvalidValue
from headrace.model.output_formats import (
    ThoughtFormat,
    ToolFormat,
    begins_inside,
    is_closed,
    thought_format,
    tool_format,
)
from headrace.model.own_templates import own_template, pair_template
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.requests.openai import ChatRequest

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TOOL = {
    "type": "function",
    "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}},
}
CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "Two ports.",
    "tool_calls": [
        {"id": "1", "function": {"name": "tide", "arguments": '{"port": "Brest", "days": [1, 2]}'}},
        {"id": "2", "function": {"name": "tide", "arguments": "{}"}},
    ],
}
WRITTEN = "\n\n" + in_tags(
    "｜DSML｜",
    "function_calls",
    '<invoke name="tide">',
    '<parameter name="port" string="true">Brest</parameter>',
    '<parameter name="days" string="false">[1, 2]</parameter>',
    "</invoke>",
    '<invoke name="tide">\n',
    "</invoke>",
)
RESULTS = [{"role": "tool", "tool_call_id": id, "content": id} for id in "12"]
TOLD = "\n\n<function_results>\n<result>1</result>\n<result>2</result>\n</function_results>\n\n"


def test_paligemma_writes_images_before_all_texts() -> None:
    image, text = image_part("data:"), {"type": "text", "text": "caption en"}
    template = ChatTemplate(own_template("paligemma"), {"bos_token": "<bos>"}, takes_images=True)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text, image, image]},
    ]
    prompt = template.render(msgspec.convert({"messages": messages}, ChatRequest))
    assert prompt == "<image><image><bos>Be brief.\ncaption en\n"
    nameless = ChatTemplate(own_template("paligemma"), {}, takes_images=True)  # of its tokens
    assert nameless.render(msgspec.convert({"messages": messages}, ChatRequest)) == prompt


@pytest.mark.parametrize(
    ("config", "prompt"),
    [
        (
            {"model_type": "qwen3", "is_original_qwen3_reranker": True},
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant "
            "passages that answer the query\n<Query>: sea <b>\n<Document>: tax\n<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (
            {"model_type": "gemma", "classifier_from_token": ["Yes"]},
            "<bos>A: sea <b>\nB: tax\n\nGiven a query A and a passage B, determine whether the "
            "passage contains an answer to the query by providing a prediction of either 'Yes' or "
            "'No'.",
        ),
    ],
)
def test_rerankers_are_prompted_as_published(config: dict[str, Any], prompt: str) -> None:
    template = ChatTemplate(pair_template(config), {"bos_token": "<bos>"})
    assert template.compares_pairs
    assert template.render_pair("sea <b>", "tax\n") == prompt
    assert pair_template({"model_type": config["model_type"]}) is None


def rendered(*messages: dict[str, Any], **fields: Any) -> str:
    body = {"messages": [*messages], **fields}
    source = own_template("deepseek_v32")
    return ChatTemplate(source, {}).render(msgspec.convert(body, ChatRequest))


def test_deepseek_v32_has_its_formats() -> None:
    source = own_template("deepseek_v32")
    assert tool_format("auto", source) is ToolFormat.DEEPSEEK_V32
    assert thought_format("auto", source) is ThoughtFormat.QWEN3
    assert own_template("llama") is own_template(None) is None


def test_deepseek_v32_opens_thoughts_where_they_are_wanted() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    plain = rendered(system, user)
    assert plain == f"{BEGIN}Be brief.<｜User｜>Hi<｜Assistant｜></think>"
    assert is_closed(ThoughtFormat.QWEN3, plain)
    for name in ("thinking", "enable_thinking"):
        thinking = rendered(system, user, chat_template_kwargs={name: True})
        assert thinking == f"{BEGIN}Be brief.<｜User｜>Hi<｜Assistant｜><think>"
        assert begins_inside(ThoughtFormat.QWEN3, thinking)


@pytest.mark.parametrize("thinks", [False, True])
def test_deepseek_v32_keeps_thoughts_of_the_last_turn_alone(thinks: bool) -> None:
    asked = {"role": "user", "content": "Tides?"}
    answer = {"role": "assistant", "content": "High.", "reasoning_content": "Told."}
    variables = {"thinking": thinks}
    turn = rendered(asked, CALLED, *RESULTS, chat_template_kwargs=variables)
    opened, thought = ("<think>", "Two ports.</think>") if thinks else ("</think>", "")
    question = f"{BEGIN}<｜User｜>Tides?<｜Assistant｜>"
    assert turn == f"{question}{opened}{thought}{WRITTEN}{END}{TOLD}{opened}"
    later = rendered(asked, CALLED, *RESULTS, answer, asked, chat_template_kwargs=variables)
    past = f"{question}</think>{WRITTEN}{END}{TOLD}</think>High.{END}"
    assert later == f"{past}<｜User｜>Tides?<｜Assistant｜>{opened}"


def test_deepseek_v32_describes_tools_after_the_instructions() -> None:
    user = {"role": "user", "content": "Hi"}
    for role, content in (("system", "Be brief."), ("developer", "Be brief."), ("user", "")):
        first = [{"role": role, "content": content}] if content else []
        text = rendered(*first, user, tools=[TOOL])
        assert text.startswith(f"{BEGIN}{content}\n\n## Tools\n\nYou have access to")
        tool = '{"name": "tide", "parameters": {"type": "object", "properties": {}}}'
        assert text.endswith(
            f"<functions>\n{tool}\n</functions>\n<｜User｜>Hi<｜Assistant｜></think>"
        )


def test_deepseek_v32_refuses_results_without_a_call() -> None:
    with pytest.raises(InvalidValue, match="a tool message answers a call"):
        rendered({"role": "user", "content": "Hi"}, RESULTS[0])
