"""No words of msgspec reach a client: each of its texts has a message of this server."""

import datetime
import json
import logging
import re
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from msgspec import Meta, _core

from headrace.errors import InvalidBody, RequestError
from headrace.tokenizer_proc.requests import openai as openai_requests
from headrace.tokenizer_proc.requests import validation_errors
from headrace.tokenizer_proc.requests.anthropic import (
    CountRequest,
    MessagesRequest,
    chat_of_messages,
    decode_count,
    decode_messages,
)
from headrace.tokenizer_proc.requests.cohere import decode_cohere_embed, decode_cohere_rerank
from headrace.tokenizer_proc.requests.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    checked_chat,
    decode_chat,
    decode_completion,
    decode_detokenize,
    decode_embedding,
    decode_tokenize,
)
from headrace.tokenizer_proc.requests.rerank import (
    RerankRequest,
    ScoreRequest,
    decode_rerank,
    decode_score,
)
from headrace.tokenizer_proc.requests.responses import (
    ResponsesRequest,
    chat_of_responses,
    decode_responses,
)
from headrace.tokenizer_proc.requests.sglang import GenerateBody, decode_generate
from headrace.tokenizer_proc.requests.validation_errors import fault_of, syntax_fault

Decode = Callable[[bytes], Any]
MSGSPEC = re.compile(
    r"`|Expected|got |Object (missing|contains)|Invalid (enum )?value|malformed|truncated|encoded"
    r"|out of range|timezone|msgspec"
)


class Color(Enum):
    RED = "red"


class Dog(msgspec.Struct, tag_field="type", tag="dog"):
    age: int


class Cat(msgspec.Struct, tag_field="type", tag="cat"):
    age: Annotated[int, Meta(ge=0)]
    mood: Literal["good", "bad"] | None = None


class One(msgspec.Struct, tag_field="type", tag=1):
    pass


class Two(msgspec.Struct, tag_field="type", tag=2):
    pass


class House(msgspec.Struct, forbid_unknown_fields=True):
    pets: list[Dog | Cat] = []
    rooms: dict[str, list[int]] = {}
    floors: dict[int, float] = {}


class Pair(msgspec.Struct, array_like=True):
    x: int
    y: int


class Single(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    x: int


FORMS: list[tuple[str, Any, str]] = [
    # Types.
    ('"1"', int, "it must be an integer, not a string"),
    ("1.0", int | None, "it must be an integer or null, not a decimal number"),
    ("[]", str | dict | None, "it must be a string, an object or null, not an array"),
    ("null", bool, "it must be a boolean, not null"),
    ("{}", float, "it must be a number, not an object"),
    ('{"type":3}', Dog | Cat, "type: must be a string"),
    ('{"type":"x"}', One | Two, "type: must be an integer"),
    ('{"rooms":{"hall":[1,"x"]}}', House, "rooms.*[1]: must be an integer, not a string"),
    ('{"rooms":{"hall":3}}', House, "rooms: each of its values must be an array, not an integer"),
    ('{"floors":{"x":1}}', House, "floors: each of its keys must be an integer, not a string"),
    ("[[1],[2,true]]", list[list[int]], "[1][1]: must be an integer, not a boolean"),
    # Fields.
    ("{}", Dog | Cat, "type: is required"),
    ('{"pets":[{"type":"dog"}]}', House, "pets[0].age: is required"),
    ('{"garden":1}', House, "garden: is not a known field"),
    # Choices.
    ('"blue"', Color, "it must be 'red', not 'blue'"),
    ("3", Literal[1, 2], "it must be 1 or 2, not 3"),
    ('"c"', Literal["a", "b"] | Dog, "it must be 'a', 'b' or an object, not 'c'"),
    ('{"pets":[{"type":"cow"}]}', House, "pets[0].type: must be 'dog' or 'cat', not 'cow'"),
    ('{"type":3}', One | Two, "type: must be 1 or 2, not 3"),
    (f'{{"type":{2**64 - 1}}}', One | Two, f"type: must be 1 or 2, not {2**64 - 1}"),
    (
        '{"pets":[{"type":"cat","age":1,"mood":"odd"}]}',
        House,
        "pets[0].mood: must be 'bad', 'good' or null, not 'odd'",
    ),
    # Ranges.
    ("0", Annotated[int, Meta(ge=1)], "it must be at least 1"),
    ("5", Annotated[int, Meta(le=1)], "it must be at most 1"),
    ("5", Annotated[int, Meta(multiple_of=2)], "it must be a multiple of 2"),
    ("5", Annotated[float, Meta(gt=7)], "it must be above 7.0"),
    ("5", Annotated[float, Meta(lt=5)], "it must be below 5.0"),
    ("5.5", Annotated[float, Meta(multiple_of=2)], "it must be a multiple of 2.0"),
    ("1e999", float, "it must be between -1.7e308 and 1.7e308"),
    ("1" * 5000, int, "it must have at most 4300 digits"),
    # Lengths.
    ('""', Annotated[str, Meta(min_length=1)], "it must have at least 1 character"),
    ('"aaa"', Annotated[str, Meta(max_length=2)], "it must have at most 2 characters"),
    ('""', Annotated[bytes, Meta(min_length=1)], "it must have at least 1 byte"),
    ("[]", Annotated[list[int], Meta(min_length=1)], "it must have at least 1 item"),
    ("{}", Annotated[dict[str, int], Meta(min_length=2)], "it must have at least 2 items"),
    ("[1]", tuple[int, int], "it must have 2 items"),
    ("[1]", Pair, "it must have at least 2 items, not 1"),
    ("[1,2]", Single, "it must have at most 1 item"),
    # Texts of a form.
    ('"aa"', Annotated[str, Meta(pattern="^b")], "it must match the pattern ^b"),
    ('"x"', datetime.datetime, "it must be a date and time, as RFC 3339 writes it"),
    ('"x"', datetime.date, "it must be a date, as RFC 3339 writes it"),
    ('"x"', datetime.time, "it must be a time, as RFC 3339 writes it"),
    (
        '"2020-01-01T00:00:00"',
        Annotated[datetime.datetime, Meta(tz=True)],
        "it must be a date and time with a time zone",
    ),
    (
        '"P1Y"',
        datetime.timedelta,
        "it must be a duration of days, hours, minutes and seconds, as ISO 8601 writes it",
    ),
    ('"P99999999999999999999D"', datetime.timedelta, "it must be nearer to 0"),
    ('"x"', UUID, "it must be a UUID"),
    ('"x"', Decimal, "it must be a decimal number"),
    ('"x!"', bytes, "it must be base64"),
]


@pytest.mark.parametrize(("source", "kind", "says"), FORMS)
def test_each_form_of_msgspec_has_a_message(source: str, kind: Any, says: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.json.decode(source, type=kind)
    assert fault_of(str(refused.value), kind).described("it") == says


def formats() -> list[str]:
    """Return what msgspec formats a ValidationError by, from its machine code."""
    found = re.findall(rb"\0([A-Z][ -~]*)%U(?=\0)", Path(str(_core.__file__)).read_bytes())
    return sorted({one.decode() for one in found})


@pytest.mark.parametrize("form", formats())
def test_no_form_in_the_binary_is_unknown(form: str) -> None:
    text = form.replace("`%s`, got", "`int`, got").replace("`%s` with", "`time` with")
    text = text.replace("`float` %s", "`float` >=")
    text = re.sub(r"%(zd|lld|llu|U|s)", "3", text.replace("%R", "'3'"))
    fault = fault_of(f"{text} - at `$.x`")
    assert fault.is_known
    assert fault.where.startswith("x")
    assert not MSGSPEC.search(fault.what)


def test_the_binary_has_the_forms_that_are_known() -> None:
    assert len(formats()) > 30


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "it ends too early"),
        ('{"x":', "it ends too early"),
        ('{"x":1,}', "an object ends with a comma, at byte 7"),
        ("[1,]", "an array ends with a comma, at byte 3"),
        ("{}}", "there is something behind its end, at byte 3"),
        ("{x:1}", "a key must be a string in double quotes, at byte 1"),
        ('{"x" 1}', "there must be ':' behind a key, at byte 5"),
        ("[1 2]", "there must be ',' or ']' behind an entry, at byte 3"),
        ('{"a":1 "b":2}', "there must be ',' or '}' behind an entry, at byte 7"),
        ("01", "a number is not written as JSON has it, at byte 1"),
        ("NaN", "there is a character that cannot be there, at byte 0"),
        (r'"\x"', "a string has an escape that JSON does not know, at byte 3"),
        (r'"\u12zz"', "'\\u' must have four hexadecimal digits behind it, at byte 6"),
        (r'"\udc00"', "a string has half of a surrogate pair, at byte 7"),
    ],
)
def test_broken_json_is_reported_by_its_place(source: str, says: str) -> None:
    with pytest.raises(msgspec.DecodeError) as refused:
        msgspec.json.decode(source)
    assert syntax_fault(str(refused.value)) == says


def test_an_unknown_form_is_not_passed_on() -> None:
    fault = fault_of("Unheard of `thing` - at `$.x[0]`")
    assert (fault.where, fault.is_known) == ("x[0]", False)
    assert not MSGSPEC.search(fault.what)
    assert syntax_fault("JSON is strange (byte 3)") == ""


def test_an_unknown_form_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(validation_errors, "COMPILED", [])
    monkeypatch.setattr(validation_errors, "SYNTAX", {})
    with caplog.at_level(logging.WARNING), pytest.raises(InvalidBody) as refused:
        decode_chat(b'{"messages": 5}')
    assert str(refused.value) == f"messages: {validation_errors.UNKNOWN}"
    assert "Expected `array`" in caplog.text
    with caplog.at_level(logging.WARNING), pytest.raises(InvalidBody) as refused:
        decode_chat(b'{"messages": ')
    assert str(refused.value) == "the body is not valid JSON"
    assert "truncated" in caplog.text


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(InvalidBody) as refused:
        decode_chat(json.dumps({"messages": [], "tool_choice": "x" * 100_000}).encode())
    assert len(str(refused.value)) < 300


# By endpoint: its decoder, a body with a wrong type, and what is said of that.
ENDPOINTS: dict[str, tuple[Decode, Any, str]] = {
    "/v1/chat/completions": (
        decode_chat,
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content: must be a string, an array or null, not an integer",
    ),
    "/v1/completions": (
        decode_completion,
        {"prompt": "x", "prompt_logprobs": "all"},
        "prompt_logprobs: must be an integer or null, not a string",
    ),
    "/v1/responses": (
        decode_responses,
        {"input": [{"role": "robot", "content": "x"}]},
        "input[0].role: must be 'assistant', 'developer', 'system', 'user' or null, not 'robot'",
    ),
    "/v1/messages": (
        decode_messages,
        {"messages": [{"role": "user"}], "max_tokens": 1},
        "messages[0].content: is required",
    ),
    "/v1/messages/count_tokens": (
        decode_count,
        {"messages": [], "thinking": {"type": "deep"}},
        "thinking.type: must be 'adaptive', 'disabled' or 'enabled', not 'deep'",
    ),
    "/generate": (
        decode_generate,
        {"text": "x", "sampling_params": {"logit_bias": {"5": "much"}}},
        "sampling_params.logit_bias: each of its values must be a number, not a string",
    ),
    "/v1/embeddings": (decode_embedding, {}, "input: is required"),
    "/v1/rerank": (
        decode_rerank,
        {"query": "q", "documents": [{"text": 1}]},
        "documents[0].text: must be a string, not an integer",
    ),
    "/v2/embed": (
        decode_cohere_embed,
        {"texts": ["x"], "embedding_types": ["f16"]},
        "embedding_types[0]: must be 'base64', 'binary', 'float', 'int8', 'ubinary' or 'uint8', "
        "not 'f16'",
    ),
    "/v2/rerank": (decode_cohere_rerank, {"documents": ["x"]}, "query: is required"),
    "/v1/score": (
        decode_score,
        {"text_1": 1, "text_2": "x"},
        "text_1: must be a string or an array, not an integer",
    ),
    "/tokenize": (
        decode_tokenize,
        {"prompt": 5},
        "prompt: must be a string or null, not an integer",
    ),
    "/detokenize": (decode_detokenize, [1], "the body must be an object, not an array"),
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_each_endpoint_names_the_field(path: str) -> None:
    decode, body, says = ENDPOINTS[path]
    with pytest.raises(InvalidBody) as refused:
        decode(json.dumps(body).encode())
    assert str(refused.value) == says
    assert refused.value.param == (says.partition(": ")[0] if ": " in says else None)


def test_a_chat_of_another_api_is_refused_too() -> None:
    with pytest.raises(InvalidBody, match=r"^messages\[0\]\.role: must be a string, not"):
        checked_chat({"messages": [{"role": 5}]})


BODIES: dict[type[msgspec.Struct], Decode] = {
    ChatRequest: decode_chat,
    CompletionRequest: decode_completion,
    EmbeddingRequest: decode_embedding,
    TokenizeRequest: decode_tokenize,
    DetokenizeRequest: decode_detokenize,
    RerankRequest: decode_rerank,
    ScoreRequest: decode_score,
    GenerateBody: decode_generate,
    ResponsesRequest: lambda body: chat_of_responses(decode_responses(body)),
    MessagesRequest: lambda body: chat_of_messages(decode_messages(body)),
    CountRequest: lambda body: chat_of_messages(decode_count(body)),
}
PARTIAL = ("DETOKENIZE_IDS", "WARM")  # their bodies are decoded whole by the others
NESTED = ("type", "role", "content", "name", "function", "text", "format", "schema", "x", "1")
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Letters, of which no phrase of msgspec's is made.
    | st.text("xyz", max_size=5)
    | st.sampled_from(["user", "function", "text", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NESTED), inner, max_size=4)
    ),
    max_leaves=8,
)


def bodies(kind: type[msgspec.Struct]) -> st.SearchStrategy[bytes]:
    """Return JSON with the fields of a body, whose values may be anything; or a part of it."""
    fields = st.dictionaries(st.sampled_from(kind.__struct_fields__), VALUES, max_size=6)
    whole = (fields | VALUES).map(lambda body: json.dumps(body).encode())
    return whole | st.tuples(whole, st.integers(0, 200)).map(lambda pair: pair[0][: pair[1]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_no_phrase_of_msgspec_reaches_a_client(kind: type[msgspec.Struct]) -> None:
    @settings(database=None)
    @given(body=bodies(kind))
    def check(body: bytes) -> None:
        try:
            BODIES[kind](body)
        except RequestError as error:
            assert not MSGSPEC.search(str(error)), str(error)
            assert error.param is None or str(error).startswith(error.param), str(error)

    check()


def test_every_body_is_decoded_by_a_tested_decoder() -> None:
    kinds = {
        value._kind
        for name, value in vars(openai_requests).items()
        if isinstance(value, openai_requests.BodyDecoder) and name not in PARTIAL
    }
    assert kinds <= BODIES.keys()
