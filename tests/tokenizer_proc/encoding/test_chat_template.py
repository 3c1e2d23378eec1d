"""Chat templates render as they do in transformers, and cannot harm the process."""

from typing import Any

import pytest
from demo_in_transformers import demo_file, demo_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.config.model_card import read_gguf
from headrace.errors import InvalidValue, ModelError, Unsupported
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.jobs.stages import Text
from headrace.tokenizer_proc.requests.openai import (
    ChatRequest,
    ContentPart,
    ImageUrl,
    RequestMessage,
)
from headrace.tokenizer_proc.requests.tools import CalledFunction, CalledTool


def render(source: str | None, *messages: RequestMessage, **variables: Any) -> str:
    request = ChatRequest(
        messages=list(messages) or [RequestMessage("user", "Hi")], chat_template_kwargs=variables
    )
    return ChatTemplate(source, {"bos_token": "<s>"}).render(request)


def test_template_gets_messages_special_tokens_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [RequestMessage("system", "Be brief."), RequestMessage("user", "Hi")]
    assert render(source, *messages) == "<s>[system]Be brief.[user]Hi[assistant]"


def test_an_answer_need_not_begin() -> None:
    request = ChatRequest(messages=[RequestMessage("user", "Hi")], add_generation_prompt=False)
    assert ChatTemplate("{{ add_generation_prompt }}", {}).render(request) == "False"


def test_blocks_leave_no_lines_behind() -> None:
    source = (
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    )
    assert render(source) == "Hi\n"


def test_loop_controls_work() -> None:
    source = "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"
    assert render(source, RequestMessage("user", "a"), RequestMessage("user", "b")) == "a"


def test_what_is_to_be_learned_is_written_as_all_else() -> None:
    source = (
        "{% set x = 1 %}{% for m in messages %}{% generation %}\n{{ m.content }}{% set x = 2 %}"
        "{% endgeneration %}{{ x }}{% endfor %}"
    )
    expected = render_jinja_template([[{"role": "user", "content": "Hi"}]], chat_template=source)
    assert render(source) == expected[0][0] == "Hi1"


def test_text_parts_are_joined_by_lines() -> None:
    message = RequestMessage("user", [ContentPart("text", "a"), ContentPart("text", "b")])
    assert render("{{ messages[0].content }}", message) == "a\nb"


def test_content_is_never_taken_for_template_code() -> None:
    assert (
        render("{{ messages[0].content }}", RequestMessage("user", "{{ 1 + 1 }}")) == "{{ 1 + 1 }}"
    )


def test_an_absent_name_is_absent() -> None:
    source = "{{ 'name' in messages[0] }} {{ messages[1].name }}"
    assert (
        render(source, RequestMessage("user", "a"), RequestMessage("user", "b", "Bo")) == "False Bo"
    )


def test_template_kwargs_cannot_replace_the_messages() -> None:
    source = "{{ thinking }} {{ messages[0].content }}"
    assert render(source, thinking="off", messages=[]) == "off Hi"


def test_json_is_written_as_transformers_writes_it() -> None:
    value = {"b": "é<&>'", "a": [1, None]}
    assert render("{{ v | tojson }}", v=value) == '{"b": "é<&>\'", "a": [1, null]}'


def test_indented_json_is_written_as_transformers_writes_it() -> None:
    assert render("{{ v | tojson(indent=4) }}", v={"a": [1]}) == (
        '{\n    "a": [\n        1\n    ]\n}'
    )


def test_what_the_template_refuses_is_refused_with_its_words() -> None:
    with pytest.raises(InvalidValue, match="roles must alternate") as refused:
        render("{{ raise_exception('roles must alternate') }}")
    assert str(refused.value) == "messages: the chat template refuses them: roles must alternate"
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{{ messages[9].role }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content | dictsort }}",
        "{{ nothing | tojson }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_fails_in_a_template_is_the_requests_error(source: str) -> None:
    says = r"^messages: the chat template cannot render them; .* fields\. Jinja says: ."
    with pytest.raises(InvalidValue, match=says):
        render(source)


def test_a_model_without_template_takes_no_conversations() -> None:
    with pytest.raises(InvalidValue, match="no chat template; use /v1/completions"):
        render(None)


def test_an_invalid_template_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("\n{% for %}", {})


def test_messages_without_content_are_refused() -> None:
    with pytest.raises(InvalidValue, match=r"^messages\[1\]\.content: ") as refused:
        render("x", RequestMessage("user", "a"), RequestMessage("user", None))
    assert refused.value.param == "messages[1].content"


def test_images_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="not 'image_url' parts"):
        render("x", RequestMessage("user", [ContentPart("image_url")]))


def test_the_demo_models_template_renders_as_in_transformers() -> None:
    card, tokenizer = read_gguf(demo_file()), demo_tokenizer()
    template = ChatTemplate(card.chat_template, card.special_tokens)
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"]):
        messages = [RequestMessage(role, f" {role} says\n\n") for role in roles]
        assert template.render(ChatRequest(messages=messages)) == tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in messages],
            add_generation_prompt=True,
            tokenize=False,
        )


def continued(template: ChatTemplate, *contents: str, **fields: Any) -> str:
    roles = ["user", "assistant"] * len(contents)
    messages = [RequestMessage(role, text) for role, text in zip(roles, contents, strict=False)]
    request = ChatRequest(messages=messages, continue_final_message=True, **fields)
    return template.render(request)


ENDED = "{% for m in messages %}<{{ m.role }}>{{ m.content FILTER}}<end>{% endfor %}"
ENDED += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(("trim", "end"), [("", "The end is \n"), ("| trim ", "The end is")])
def test_the_last_message_is_continued_where_it_ends(trim: str, end: str) -> None:
    template = ChatTemplate(ENDED.replace("FILTER", trim), {})
    prompt = "<user>Hi<end><assistant>"
    assert continued(template, "Hi", "The end is \n") == prompt + end
    assert continued(template, "Hi", "end") == prompt + "end"


def test_message_left_out_by_the_template_cannot_be_continued() -> None:
    with pytest.raises(InvalidValue, match="leaves the last message out") as refused:
        continued(ChatTemplate("{{ messages[0].content }}", {}), "Hi", "So")
    assert refused.value.param == "continue_final_message"


def test_the_demo_models_template_continues_as_in_transformers() -> None:
    card, tokenizer = read_gguf(demo_file()), demo_tokenizer()
    template = ChatTemplate(card.chat_template, card.special_tokens)
    for start in ("Sure: ", "Sure", "Sure\n\n"):
        assert continued(template, "Hi", start) == tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": start}],
            continue_final_message=True,
            tokenize=False,
        )


def test_a_request_brings_a_template_only_where_it_is_trusted() -> None:
    request = ChatRequest(messages=[RequestMessage("user", "Hi")], chat_template="{{ bos_token }}!")
    assert ChatTemplate(None, {"bos_token": "<s>"}, trusts_requests=True).render(request) == "<s>!"
    with pytest.raises(Unsupported, match="--trust-request-chat-template") as refused:
        ChatTemplate("x", {}).render(request)
    assert refused.value.param == "chat_template"


UNCOMPILABLE = {
    "\n{% for %}": "line 2 is not valid; mend it. Jinja says: ",
    "{{ x | nothing }}": "line 1 is not valid; mend it. Jinja says: ",
    f"{{{{ {'-' * 9999}x }}}}": "it is nested too deeply; use fewer levels",
    "{{ 9 ** (9 ** 8) }}": "it takes more than 0.5 s of CPU time; leave out large constants",
}


@pytest.mark.parametrize("source", UNCOMPILABLE)
def test_uncompilable_request_template_is_a_request_error(source: str) -> None:
    template = ChatTemplate("x", {}, cpu_s=0.5, trusts_requests=True)
    request = ChatRequest(messages=[RequestMessage("user", "Hi")], chat_template=source)
    with pytest.raises(InvalidValue) as refused:
        template.render(request)
    expected = f"chat_template: cannot be compiled: {UNCOMPILABLE[source]}"
    assert str(refused.value).startswith(expected)
    assert refused.value.param == "chat_template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 12 }}",  # computed when it is compiled
        "{{ messages[0].content * 10 ** 9 }}",
        "{% set n = namespace(x=messages[0].content * 999) %}"
        "{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    ],
)
def test_a_request_s_template_has_a_limit_of_memory(source: str) -> None:
    template = ChatTemplate("x", {}, trusts_requests=True)
    request = ChatRequest(messages=[RequestMessage("user", "Hi")], chat_template=source)
    with pytest.raises(InvalidValue, match="takes more than 512 MB of memory") as refused:
        template.render(request)
    assert refused.value.param == "chat_template"
    assert template.render(ChatRequest(messages=[RequestMessage("user", "Hi")])) == "x"


# As templates of models that take images have it: content is parts, and nothing else.
PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}:"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% elif p.type == 'image' %}<image>{% endif %}{% endfor %};{% endfor %}"
)
TEXT_OR_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
LOOK = RequestMessage(
    "user",
    [
        ContentPart("text", "a"),
        ContentPart("image_url", image_url=ImageUrl("data:")),
        ContentPart("text", "b"),
    ],
)


def seen(source: str, *messages: RequestMessage, **fields: Any) -> str:
    template = ChatTemplate(source, {}, takes_images=True)
    return template.render(ChatRequest(messages=list(messages), **fields))


@pytest.mark.parametrize(
    ("source", "text"), [(PARTS_ONLY, "user:a<image>b;"), (TEXT_OR_PARTS, "a<image>b")]
)
def test_images_are_where_they_are_among_texts(source: str, text: str) -> None:
    assert seen(source, LOOK) == text


def test_a_text_is_a_part_where_a_template_has_nothing_else() -> None:
    assert seen(PARTS_ONLY, RequestMessage("user", "Hi"), LOOK) == "user:Hi;user:a<image>b;"
    calls = [CalledTool(function=CalledFunction("f", "{}"))]
    assert seen(PARTS_ONLY, RequestMessage("assistant", None, tool_calls=calls)) == "assistant:;"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content | trim }};{% endfor %}",
            "a\n<image>\nb",
        ),
        (
            "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}",
            "a\n<image>\nb",
        ),
        (PARTS_ONLY, "a<image>b"),
    ],
)
def test_a_template_without_images_gets_a_text_for_each(source: str, text: str) -> None:
    template = ChatTemplate(source, {}, takes_images=True, image_text="<image>")
    assert template.render(ChatRequest(messages=[LOOK])) == f"user:{text};"


def test_parts_stay_parts_with_an_image_or_without() -> None:
    texts = RequestMessage("user", [ContentPart("text", "a"), ContentPart("text", "b")])
    assert seen(TEXT_OR_PARTS, texts) == "ab"
    assert seen(PARTS_ONLY, texts) == "user:ab;"


def test_special_tokens_are_added_unless_text_begins_with_one() -> None:
    first = {"bos_token": "<s>"}
    images, texts = ChatTemplate("", first, takes_images=True), ChatTemplate("", first)
    without = ChatTemplate("", {}, takes_images=True)
    assert images.to_encode("Hi") == Text("Hi", True)
    assert images.to_encode("<s>Hi") == Text("<s>Hi", False)
    assert without.to_encode("Hi") == Text("Hi", True)
    assert texts.to_encode("Hi") == Text("Hi", False)
    for asked in (False, True):
        for template in (images, texts):
            assert template.to_encode("Hi", asked) == Text("Hi", asked)


def test_a_last_message_of_parts_goes_on() -> None:
    assert seen(PARTS_ONLY, LOOK, continue_final_message=True) == "user:a<image>b"
    image = RequestMessage("user", [ContentPart("image_url")])
    assert seen(PARTS_ONLY, image, continue_final_message=True) == "user:<image>"


def test_a_part_that_is_neither_is_refused_by_its_place() -> None:
    parts = [ContentPart("input_audio"), ContentPart("image_url")]
    with pytest.raises(Unsupported, match=r"^messages\[0\]\.content\[0\]: .*not 'input_audio'"):
        seen(PARTS_ONLY, RequestMessage("user", parts))


def test_a_template_may_look_into_content_that_is_not_there() -> None:
    """As that of gpt-oss does, which has thoughts or content beside a call, not both."""
    source = (
        "{% for m in messages %}{% if 'x' in m.content and m.thinking %}both{% endif %}"
        "{{ m.content }}{{ m.thinking }}{% for c in m.tool_calls %}"
        "{{ c.function.arguments|tojson }}{% endfor %}{% endfor %}"
    )
    call = CalledTool(CalledFunction("f", '{"a": 1}'), id="1")
    message = RequestMessage("assistant", None, tool_calls=[call], reasoning="Hm.")
    assert render(source, message) == 'Hm.{"a": 1}'
    spoken = RequestMessage("assistant", "x", tool_calls=[call], reasoning="Hm.")
    assert render(source, spoken) == 'x{"a": 1}'
