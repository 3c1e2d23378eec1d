"""Tools with templates that have no place for them: a message describes them, calls are text."""

import json
from typing import Any

import pytest

from headrace.config.model_card import find_demo_model, read_gguf
from headrace.errors import Unsupported
from headrace.model.output_formats import tool_format
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.requests.openai import decode_chat

ROLES = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ROLES
)
DROPS_SYSTEM = ROLES.replace("messages %}", "messages if m.role != 'system' %}")
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
) + ROLES
NOW = {"type": "function", "function": {"name": "now", "description": "Die Uhrzeit, präzise"}}
USER = {"role": "user", "content": "What time is it?"}
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"zone": "Ås"}'}},
    {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
]
HISTORY = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "a", "content": "7:00"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "8:00"}]},
    {"role": "user", "content": "So?"},
]
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Ås"}}\n</tool_call>'
RESULTS = "<tool_response>\n7:00\n</tool_response>\n\n<tool_response>\n8:00\n</tool_response>"


def rendered(source: str, describes: bool = True, **fields: Any) -> str:
    """Return the prompt of a conversation."""
    body = json.dumps({"messages": [USER], "tools": [NOW]} | fields).encode()
    return ChatTemplate(source, {}, describes_tools=describes).render(decode_chat(body))


def test_a_system_message_describes_tools() -> None:
    prompt = rendered(ROLES)
    assert prompt.startswith("[system] # Tools")
    assert '{"name": "now", "description": "Die Uhrzeit, präzise"}' in prompt
    assert prompt.endswith("[user] What time is it?\n")
    system = {"role": "system", "content": "Be brief."}
    assert rendered(ROLES, messages=[system, USER]).startswith("[system] Be brief.\n\n# Tools")


@pytest.mark.parametrize("source", [NO_SYSTEM, DROPS_SYSTEM])
def test_the_user_describes_tools_without_a_system_role(source: str) -> None:
    prompt = rendered(source)
    assert prompt.startswith("[user] # Tools")
    assert prompt.endswith("\n\nWhat time is it?\n")


def test_earlier_calls_and_results_are_text() -> None:
    prompt = rendered(ROLES, messages=HISTORY)
    assert f"[assistant] {CALL}\n<tool_call>" in prompt
    assert prompt.endswith(f"[user] {RESULTS}\n\nSo?\n")
    assert "None" not in prompt
    prompt = rendered(ALTERNATES, messages=HISTORY)
    assert prompt.startswith("[user] # Tools")


def test_a_call_after_words_is_on_its_own_line() -> None:
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS[:1]}
    assert f"[assistant] Let me see.\n{CALL}\n" in rendered(ROLES, messages=[USER, said])


def test_a_conversation_goes_on_without_its_tools() -> None:
    prompt = rendered(ROLES, messages=HISTORY, tools=None)
    assert prompt.startswith("[user] What time is it?\n[assistant] <tool_call>")
    assert rendered(ROLES, tool_choice="none") == "[user] What time is it?\n"


def test_a_template_with_tools_gets_them_itself() -> None:
    assert rendered("{{ tools | tojson }}") == json.dumps([NOW], ensure_ascii=False)


def test_without_a_parser_tools_are_refused() -> None:
    with pytest.raises(Unsupported, match="--tool-call-parser auto or hermes") as refused:
        rendered(ROLES, describes=False)
    assert refused.value.param == "tools"


def test_the_demo_model_has_the_generic_format() -> None:
    path = find_demo_model()
    assert path is not None
    card = read_gguf(path)
    assert tool_format("auto", card.chat_template) == "hermes"
    prompt = rendered(card.chat_template or "", messages=HISTORY)
    assert prompt.count("<|im_start|>system") == 1
    assert f"<|im_start|>assistant\n{CALL}" in prompt
    assert f"<|im_start|>user\n{RESULTS}\n\nSo?<|im_end|>" in prompt
