"""What a script says is written as the model would, and read back by the detokenizer's parsers."""

import json
from typing import Any

import pytest

from headrace.detokenizer_proc.parser_selection import parser_of
from headrace.detokenizer_proc.parsers.pieces import gathered
from headrace.errors import InvalidValue
from headrace.ipc.messages import Parsing
from headrace.model.output_formats import ThoughtFormat, ToolFormat
from headrace.testing.script import MockError, MockReply, MockToolCall, Words
from headrace.tokenizer_proc.scripts.response_text import error_of, response_text, words_of

ARGUMENTS: dict[str, Any] = {
    "city": 'Ås "x"',
    "days": 3,
    "zip": "0150",
    "hours": [True, None],
    "more": {"a": -1.5},
}
STRINGS = {"forecast": ["city"]}


def read(text: str, parsing: Parsing) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return what the parser of a model finds: text, thought, and calls."""
    parser = parser_of(parsing)
    found, thought, calls = gathered(parser.feed(text) + parser.flush())
    return found, thought, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("format", ToolFormat)
@pytest.mark.parametrize("text", ["", "Let me see."])
def test_calls_are_read_back_in_every_format(format: ToolFormat, text: str) -> None:
    parsing = Parsing(tools=format, string_parameters=STRINGS)
    reply = MockReply(text, calls=[MockToolCall("forecast", ARGUMENTS), MockToolCall("now")])
    found, _, calls = read(response_text(reply, parsing), parsing)
    assert calls == [("forecast", ARGUMENTS), ("now", {})]
    assert found.strip() == text


@pytest.mark.parametrize("format", ThoughtFormat)
@pytest.mark.parametrize("begins_inside", [False, True])
@pytest.mark.parametrize("thought", ["", "Hm."])
def test_thoughts_are_read_back(format: ThoughtFormat, begins_inside: bool, thought: str) -> None:
    parsing = Parsing(thoughts=format, begins_inside=begins_inside)
    assert read(response_text(MockReply("Yes.", thought), parsing), parsing)[:2] == (
        "Yes.",
        thought,
    )


def test_call_without_tools_in_the_request_is_refused() -> None:
    with pytest.raises(InvalidValue, match="calls now, and the request offers no tools"):
        response_text(MockReply(calls=[MockToolCall("now")]), Parsing(thoughts=ThoughtFormat.QWEN3))


def test_thought_of_a_model_without_any_is_refused() -> None:
    with pytest.raises(InvalidValue, match="--reasoning-parser qwen3"):
        response_text(MockReply("Yes.", "Hm."), None)


def test_words_are_a_function_of_prompt_and_seed() -> None:
    words = Words(9)
    assert words_of(words, 1, b"p", 0) == words_of(words, 1, b"p", 0)
    others = [(2, b"p", 0), (1, b"q", 0), (1, b"p", 1), (None, b"p", 0)]
    texts = {words_of(words, *other) for other in [(1, b"p", 0), *others]}
    assert len(texts) == 5
    assert words_of(Words(9, seed=1), 5, b"p", 0) == words_of(words, 1, b"p", 0)


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (429, "rate_limit_error", "rate_limit_exceeded"),
        (418, "invalid_request_error", "invalid_value"),
        (500, "server_error", "internal_error"),
    ],
)
def test_error_has_the_fields_of_its_status(status: int, kind: str, code: str) -> None:
    error = error_of(MockError(status, retry_after=1.5))
    assert (error.status, error.type, error.code) == (status, kind, code)
    assert ("retry-after", "1.5") in error.headers
