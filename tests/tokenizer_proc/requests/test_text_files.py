"""Files and documents of text are text to the model; others are refused with what to do."""

import base64
import json
from typing import Any

import pytest
from planners import HTTP, make_planner

from headrace.errors import RequestError
from headrace.tokenizer_proc.requests.text_files import text_of_url

BASE64 = base64.b64encode("Grüße".encode()).decode()
URL = f"data:text/plain;base64,{BASE64}"
PDF = "data:application/pdf;base64,JVBERi0="


def prompt_of(kind: str, content: list[dict[str, Any]]) -> str:
    """Return the prompt of a request with one message."""
    said = [{"role": "user", "content": content}]
    body = {"max_tokens": 5} | ({"input": said} if kind == "responses" else {"messages": said})
    fields = json.dumps(body if kind != "responses" else {"input": said}).encode()
    (prompt,) = make_planner().plan(kind, HTTP, fields).prompts
    return bytes(prompt.tolist()).decode()


def test_a_text_comes_out_of_a_data_url() -> None:
    assert text_of_url(URL, "x") == "Grüße"
    assert text_of_url("data:,a%20b", "x") == "a b"
    assert text_of_url("data:text/csv;charset=utf-8,1,2", "x") == "1,2"
    assert text_of_url("data:application/json;base64,e30=", "x") == "{}"


def test_a_file_of_text_is_written_below_its_name() -> None:
    file = {"file_data": URL, "filename": "a.txt"}
    asked = {"type": "text", "text": "What?"}
    assert prompt_of("chat", [{"type": "file", "file": file}, asked]) == "a.txt\nGrüße\nWhat?:"
    item = {"type": "input_file"} | file
    text = {"type": "input_text", "text": "What?"}
    assert prompt_of("responses", [item, text]) == "a.txt\nGrüße\nWhat?:"


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "Grüße"},
        {"type": "base64", "media_type": "text/plain", "data": BASE64},
        {"type": "content", "content": "Grüße"},
        {"type": "content", "content": [{"type": "text", "text": "Grüße"}]},
    ],
)
def test_a_document_of_text_is_written_below_its_title(source: dict[str, Any]) -> None:
    block = {"type": "document", "source": source, "title": "A", "citations": {"enabled": False}}
    assert prompt_of("messages", [block]) == "A\nGrüße:"
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block | {"context": "B"}]}
    assert prompt_of("messages", [result]) == "A\nB\nGrüße:"


def document(**fields: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    return {"type": "document", "source": source} | fields


@pytest.mark.parametrize(
    ("kind", "part", "says"),
    [
        (
            "chat",
            {"type": "file", "file": {"file_data": PDF}},
            "[0].file.file_data: files are read as text, and 'application/pdf' is not",
        ),
        ("chat", {"type": "file", "file": {"file_id": "f"}}, "file.file_data: must be there"),
        ("chat", {"type": "file", "file": {"file_data": "x"}}, "file_data: must be a data: URL"),
        ("chat", {"type": "file", "file": {"file_data": "data:;base64,?"}}, "is not valid base64"),
        ("chat", {"type": "file", "file": {"file_data": "data:,%ff"}}, "byte 0 is not UTF-8"),
        (
            "responses",
            {"type": "input_file", "file_data": PDF},
            "input[0].content[0].file_data: files are read as text",
        ),
        (
            "messages",
            document(),
            "messages[0].content[0].source.media_type: files are read as text",
        ),
        ("messages", document(source={"type": "url", "url": "x"}), "content[0].source: must have"),
        ("messages", document(citations={"enabled": True}), "content[0].citations: not supported"),
    ],
)
def test_a_file_that_is_no_text_is_refused(kind: str, part: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        prompt_of(kind, [part])
    assert says in str(refused.value)
