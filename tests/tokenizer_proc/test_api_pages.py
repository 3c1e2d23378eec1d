"""The pages about the APIs name every field that there is, with its range."""

import re
from pathlib import Path

import pytest

from headrace.tokenizer_proc.requests import anthropic, openai, responses
from headrace.tokenizer_proc.requests.anthropic import MessagesRequest
from headrace.tokenizer_proc.requests.constraints import NAMES as GRAMMAR_NAMES
from headrace.tokenizer_proc.requests.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from headrace.tokenizer_proc.requests.rerank import RerankRequest, ScoreRequest
from headrace.tokenizer_proc.requests.responses import ResponsesRequest
from headrace.tokenizer_proc.requests.sampling import RANGES
from headrace.tokenizer_proc.requests.sglang import GenerateBody, SglangSamplingParams

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {
    "completions": (ChatRequest, CompletionRequest),
    "responses": (ResponsesRequest,),
    "messages": (MessagesRequest,),
    "generate": (GenerateBody, SglangSamplingParams),
    "embeddings": (EmbeddingRequest, RerankRequest, ScoreRequest),
    "tokenize": (TokenizeRequest, DetokenizeRequest),
}
NOT_READ = {
    "completions": openai.NOT_READ,
    "responses": responses.NOT_READ,
    "messages": anthropic.NOT_READ,
}
POWERS = {2**63: "2^63", 2**31: "2^31"}


def spelled(number: float) -> str:
    """Return a bound as pages have it."""
    for power, text in POWERS.items():
        if number in (-power, power - 1):
            return f"-{text}" if number < 0 else f"{text} - 1"
    return str(number)


@pytest.mark.parametrize("page", KINDS)
def test_a_page_names_every_field_of_its_requests(page: str) -> None:
    text = (DOCS / "api" / f"{page}.md").read_text()
    if page == "completions":
        text += (DOCS / "structured_output.md").read_text() + (DOCS / "tools.md").read_text()
    names = {name for kind in KINDS[page] for name in kind.__struct_fields__}
    missing = {name for name in {*names, *NOT_READ.get(page, ())} if f"`{name}`" not in text}
    assert not missing


@pytest.mark.parametrize("page", ["completions", "embeddings"])
def test_a_page_has_the_ranges_that_are_checked(page: str) -> None:
    text = (DOCS / "api" / f"{page}.md").read_text()
    names = {name for kind in KINDS[page] for name in kind.__struct_fields__}
    shown = 0
    for name, (low, high) in RANGES.items():
        if name not in names:
            continue
        (row,) = re.findall(rf"^\| `{name}` \|.*", text, re.MULTILINE)
        limits = f"{spelled(low)} and up" if high is None else f"{spelled(low)} to {spelled(high)}"
        assert f"| {limits} |" in row, name
        shown += 1
    assert shown > 2


def test_there_is_a_page_for_each_family_of_the_index() -> None:
    index = (DOCS / "api.md").read_text()
    linked = set(re.findall(r"\(api/(\w+)\.md\)", index))
    assert linked == {path.stem for path in (DOCS / "api").glob("*.md")} == KINDS.keys()


def test_fields_of_structured_output_are_on_its_page() -> None:
    text = (DOCS / "structured_output.md").read_text()
    assert not [name for name in GRAMMAR_NAMES if f"`{name}`" not in text]
