"""Bodies are decoded as OpenAI's are; what cannot be acted on is refused by name."""

import json
import re
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import EmbeddingCreateParams
from openai.types import completion_create_params as openai_text
from openai.types.chat import completion_create_params as openai_chat

from headrace.errors import InvalidBody, InvalidValue, RequestError, Unsupported
from headrace.tokenizer_proc.requests.openai import (
    NOT_READ,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    decode_chat,
    decode_completion,
    decode_embedding,
)
from headrace.tokenizer_proc.requests.sampling import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_WORD_LENGTH,
    RANGES,
    UNSUPPORTED,
)

MESSAGES = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(json.dumps({"messages": MESSAGES} | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return decode_completion(json.dumps({"prompt": "Hello"} | fields).encode())


def test_the_least_chat_is_its_messages() -> None:
    request = chat()
    assert [(m.role, m.content) for m in request.messages] == [("user", "Hello")]
    assert (request.max_tokens, request.temperature, request.stop) == (None, None, None)
    assert request.skip_special_tokens
    assert not request.ignore_eos


def test_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "user", "content": parts}])
    content = request.messages[0].content
    assert isinstance(content, list)
    assert [part.text for part in content] == ["a", "b"]


def test_unknown_fields_are_ignored() -> None:
    assert chat(user="me", metadata={"a": 1}, store=False).messages


@pytest.mark.parametrize("prompt", ["text", ["one", "two"], [1, 2, 3], [[1, 2], [3]], [""], [[]]])
def test_every_form_of_prompt_is_taken(prompt: object) -> None:
    assert completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, ["one", 2], [1, "two"], [[1], "two"], [1.5]])
def test_any_other_prompt_is_refused_with_the_forms_there_are(prompt: object) -> None:
    with pytest.raises(InvalidBody, match="a list of lists of token ids") as refused:
        completion(prompt=prompt)
    assert refused.value.param == "prompt"


def test_an_empty_list_of_prompts_is_refused() -> None:
    with pytest.raises(InvalidValue, match="must not be empty"):
        completion(prompt=[])


def test_error_names_the_wrong_field_not_the_prompt() -> None:
    with pytest.raises(
        InvalidBody, match=r"^max_tokens: must be an integer or null, not a"
    ) as refused:
        completion(prompt=[1, 2], max_tokens="many")
    assert refused.value.param == "max_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [}',
        b'{"chat_template_kwargs": {"a": ' + b"[" * 100000,
    ],
    ids=["empty", "open", "wrong bracket", "too deep"],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidBody, match=r"not valid JSON|nested too deeply"):
        decode_chat(body)


def test_unknown_name_is_refused_in_our_words() -> None:
    with pytest.raises(InvalidBody, match=r"^tool_choice: must be 'auto', .*, not 'x'$"):
        decode_chat(b'{"messages": [], "tool_choice": "x"}')


@pytest.mark.parametrize("text", [b"\\ud800", b"\\udc00", b"a\\uDBFFx", b"\\ud83d\\ud83d\\ude00"])
@pytest.mark.parametrize("end", [b'"}', b"a"])
def test_lone_surrogate_has_its_own_message(text: bytes, end: bytes) -> None:
    with pytest.raises(InvalidBody, match="half of a surrogate pair"):
        decode_chat(b'{"model": "' + text + end)
    with pytest.raises(InvalidBody, match="half of a surrogate pair"):
        decode_chat(b'{"model": "\xed\xa0\x80"}')


@pytest.mark.parametrize("text", [b"\\\\ud800", b"\\ud83d\\ude00", b"\\n\\ud83d\\ude00", b"\xff"])
def test_other_faults_are_not_called_surrogates(text: bytes) -> None:
    with pytest.raises(InvalidBody, match="not valid"):
        decode_chat(b'{"model": "' + text + b'", \xff}')


@pytest.mark.parametrize("body", [b"[]", b"1", b'"text"', b"null"])
def test_what_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidBody, match=r"^the body must be an object, not ") as refused:
        decode_chat(body)
    assert refused.value.param is None


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidBody, match=r"^messages: is required$"):
        decode_chat(b"{}")


def test_a_wrong_type_deep_inside_is_located() -> None:
    with pytest.raises(InvalidBody, match=r"must be a string, not an integer$") as refused:
        chat(messages=[{"role": 5, "content": "x"}])
    assert refused.value.param == "messages[0].role"


WORDS = f"strings of 1 to {MAX_WORD_LENGTH} characters, not"


OUT_OF_RANGE: list[tuple[str, object, str]] = [
    ("max_tokens", 0, "at least 1, not 0"),
    ("max_tokens", -1, "at least 1, not -1"),
    ("max_completion_tokens", 0, "at least 1, not 0"),
    ("temperature", -0.1, "at least 0, not -0.1"),
    ("top_p", 0, "above 0 and at most 1, not 0.0"),
    ("top_p", 1.1, "above 0 and at most 1, not 1.1"),
    ("top_p", -1, "above 0 and at most 1, not -1.0"),
    ("top_k", -2, "at least -1, not -2"),
    ("n", 0, "between 1 and 128, not 0"),
    ("n", 129, "between 1 and 128, not 129"),
    ("seed", 2**63, f"between {-(2**63)} and {2**63 - 1}, not {2**63}"),
    ("seed", -(2**63) - 1, f"between {-(2**63)} and {2**63 - 1}, not {-(2**63) - 1}"),
    ("stop", "", f"at most {MAX_STOP_STRINGS} {WORDS} one of 0"),
    ("stop", ["a", ""], f"at most {MAX_STOP_STRINGS} {WORDS} one of 0"),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1), f"{WORDS} {MAX_STOP_STRINGS + 1}"),
    ("stop", "x" * (MAX_WORD_LENGTH + 1), f"{WORDS} one of {MAX_WORD_LENGTH + 1}"),
    ("bad_words", ["x" * (MAX_WORD_LENGTH + 1)], f"{WORDS} one of {MAX_WORD_LENGTH + 1}"),
    ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1), "at most 256 entries, not 257"),
    ("bad_words", [""], f"at most {MAX_BAD_WORDS} {WORDS} one of 0"),
    ("bad_words", ["x"] * (MAX_BAD_WORDS + 1), f"{WORDS} {MAX_BAD_WORDS + 1}"),
    (
        "logit_bias",
        {str(id): 1 for id in range(MAX_LOGIT_BIASES + 1)},
        "at most 1024 entries, not 1025",
    ),
    ("presence_penalty", 2.1, "between -2 and 2, not 2.1"),
    ("frequency_penalty", -2.1, "between -2 and 2, not -2.1"),
    ("repetition_penalty", 0, "above 0 and at most 2, not 0.0"),
    ("repetition_penalty", 2.1, "above 0 and at most 2, not 2.1"),
    ("repetition_penalty", 1e300, "above 0 and at most 2, not 1e+300"),
    ("min_p", 1.1, "between 0 and 1, not 1.1"),
    ("min_tokens", -1, "at least 0, not -1"),
    ("top_logprobs", 21, "between 0 and 20, not 21"),
    ("top_logprobs", 5, "only allowed with 'logprobs': true"),
    ("prompt_logprobs", 21, "between 0 and 20, not 21"),
    ("truncate_prompt_tokens", 0, "-1, all there is room for, or at least 1, not 0"),
    ("truncate_prompt_tokens", -2, "at least -1, not -2"),
    ("priority", 2**31, f"between {-(2**31)} and {2**31 - 1}, not {2**31}"),
    ("stream_options", {"include_usage": True}, "only allowed with 'stream': true"),
    ("messages", [], "at least one message"),
]


@pytest.mark.parametrize(("name", "value", "says"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name_value_and_range(
    name: str, value: object, says: str
) -> None:
    with pytest.raises(InvalidValue, match=rf"^{name}: .*{re.escape(says)}$") as refused:
        chat(**{name: value})
    assert (refused.value.status, refused.value.code) == (400, "invalid_value")
    assert refused.value.param == name


def test_every_field_with_a_range_is_refused_above() -> None:
    assert RANGES.keys() & {*ChatRequest.__struct_fields__} <= {name for name, *_ in OUT_OF_RANGE}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0),
        ("temperature", 1e9),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", 0),
        ("n", 128),
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("stop", []),
        ("stop", ["x" * MAX_WORD_LENGTH] * MAX_STOP_STRINGS),
        ("stop_token_ids", [0] * MAX_STOP_TOKEN_IDS),
        ("bad_words", ["x"] * MAX_BAD_WORDS),
        ("logit_bias", {}),
        ("logit_bias", {str(id): 1 for id in range(MAX_LOGIT_BIASES)}),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 1e-3),
        ("repetition_penalty", 2),
        ("min_p", 1),
        ("min_tokens", 0),
        ("prompt_logprobs", 20),
        ("priority", -(2**31)),
        ("response_format", {"type": "text"}),
        ("logprobs", False),
        ("tools", []),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_taken(name: str, value: object) -> None:
    chat(**{name: value})


WHOLE = [("max_tokens", 7, "7.0"), ("n", 2, "2e0"), ("seed", 0, "-0.0"), ("top_k", 30, "3.0E1")]


@pytest.mark.parametrize(("name", "number", "written"), WHOLE)
def test_an_integer_may_be_written_as_a_float(name: str, number: int, written: str) -> None:
    body = f'{{"prompt": [1.0, 2], "{name}": {written}, "top_p": 1.0, "min_p": 0.5}}'
    request = decode_completion(body.encode())
    found = getattr(request, name)
    assert (found, type(found), request.prompt, request.min_p) == (number, int, [1, 2], 0.5)
    assert type(request.top_p) is float


@pytest.mark.parametrize(
    "written", ["1.5", "1e300", "9007199254740993.0e3", '"1"', '"1.0"', "true"]
)
def test_no_other_number_or_text_is_an_integer(written: str) -> None:
    for more in ("", ', "top_k": 1.0'):
        with pytest.raises(InvalidBody, match=r"^max_tokens: must be an integer or null, not"):
            decode_completion(f'{{"prompt": "a", "max_tokens": {written}{more}}}'.encode())


def test_a_whole_float_is_no_boolean() -> None:
    with pytest.raises(InvalidBody, match=r"^echo: must be a boolean, not"):
        decode_completion(b'{"prompt": "a", "n": 1.0, "echo": 1.0}')


def test_a_number_beyond_any_float_is_refused_beside_one() -> None:
    for body in (b'{"prompt": "a", "n": 1.0, "x": 1e400}', b'{"prompt": "a", "n": 1e400}'):
        with pytest.raises(InvalidBody):
            decode_completion(body)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "top_k"])
def test_an_integer_beyond_any_float_is_no_error_of_the_server(name: str) -> None:
    chat(**{name: 10**400})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("audio", {"voice": "alloy", "format": "wav"}, "not supported"),
        ("modalities", ["text", "audio"], "must be"),
        ("web_search_options", {"search_context_size": "low"}, "not supported"),
        ("moderation", {"model": "x"}, "not supported"),
    ],
)
def test_what_no_text_model_does_is_refused(field: str, value: Any, says: str) -> None:
    with pytest.raises(Unsupported, match=says) as refused:
        chat(**{field: value})
    assert refused.value.param == field
    chat(**{field: None})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_vllm_and_sglang_add_is_not_dropped_in_silence(name: str) -> None:
    for ask in (chat, completion):
        for asked in (True, 1, ["x"], {"a": 1}):
            with pytest.raises(Unsupported, match=f"^{name}: not supported") as refused:
                ask(**{name: asked})
            assert refused.value.param == name
        for unasked in (None, False, [], {}):
            ask(**{name: unasked})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("truncation_side", "right", "keeps its end"),
        ("separate_reasoning", False, "--reasoning-parser"),
        ("echo", True, "not supported"),
    ],
)
def test_what_is_done_in_one_way_only_is_refused_in_the_other(
    field: str, value: Any, says: str
) -> None:
    with pytest.raises(Unsupported, match=f"^{field}: .*{says}"):
        chat(**{field: value})
    chat(truncation_side="left", separate_reasoning=True, echo=False)


def test_every_field_of_openai_s_is_known_or_changes_nothing() -> None:
    for theirs, ours, unread in [
        (openai_chat.CompletionCreateParamsBase, ChatRequest, set(NOT_READ)),
        (openai_text.CompletionCreateParamsBase, CompletionRequest, set()),
        (EmbeddingCreateParams, EmbeddingRequest, set()),
    ]:
        assert get_type_hints(theirs).keys() - set(ours.__struct_fields__) == unread
    asked = dict.fromkeys(NOT_READ, "x") | {"modalities": ["text"], "function_call": "none"}
    assert chat(**asked) == chat(modalities=["text"], function_call="none")


def test_log_probabilities_of_a_prompt_do_not_stream() -> None:
    with pytest.raises(Unsupported, match=r"^prompt_logprobs: "):
        chat(prompt_logprobs=1, stream=True)


@pytest.mark.parametrize(
    "fields", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"best_of": 0}]
)
def test_a_best_of_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=r"^best_of: "):
        completion(**fields)


@pytest.mark.parametrize("logprobs", [-1, 21])
def test_logprobs_of_a_completion_have_a_range(logprobs: int) -> None:
    with pytest.raises(InvalidValue, match=r"^logprobs: must be between 0 and 20"):
        completion(logprobs=logprobs)


def test_how_many_sequences_and_logprobs_are_wanted() -> None:
    assert [chat(n=3).num_sequences, completion(n=2, best_of=5).num_sequences] == [3, 5]
    assert completion(best_of=2, n=2, stream=True).num_sequences == 2
    wanted = [chat(), chat(logprobs=True), chat(logprobs=True, top_logprobs=4)]
    assert [request.num_logprobs for request in wanted] == [None, 0, 4]
    assert [completion().num_logprobs, completion(logprobs=0).num_logprobs] == [None, 0]


def embedding(**fields: Any) -> EmbeddingRequest:
    return decode_embedding(json.dumps({"input": "Hello"} | fields).encode())


@pytest.mark.parametrize("text", ["text", ["one", "two"], [1, 2, 3], [[1, 2], [3]]])
def test_every_form_of_input_is_taken(text: object) -> None:
    assert embedding(input=text).input == text


@pytest.mark.parametrize("text", [None, 5, {"a": 1}, ["one", 2]])
def test_any_other_input_is_refused(text: object) -> None:
    with pytest.raises(InvalidBody, match=r"^input: must be a string"):
        embedding(input=text)


def test_an_embedding_is_of_something_in_some_form() -> None:
    with pytest.raises(InvalidValue, match=r"^input: must not be empty"):
        embedding(input=[])
    with pytest.raises(InvalidBody, match="encoding_format"):
        embedding(encoding_format="int8")


def test_stop_is_a_string_a_list_or_nothing() -> None:
    assert chat().stops == []
    assert chat(stop="a").stops == ["a"]
    assert chat(stop=["a", "b"]).stops == ["a", "b"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__})


@settings(max_examples=200, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(NAMES), anything, max_size=4))
def test_any_json_is_taken_or_refused_politely(fields: dict[str, Any]) -> None:
    for decode in (chat, completion):
        try:
            decode(**fields)
        except RequestError as error:
            assert error.status == 400
