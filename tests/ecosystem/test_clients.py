"""Clients that people have already: they are told a URL, and nothing else."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from servers import RunningServer

pytestmark = pytest.mark.filterwarnings("default")  # they are not ours

litellm = pytest.importorskip("litellm", reason="make ecosystem")
langchain_openai = pytest.importorskip("langchain_openai", reason="make ecosystem")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "demo"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer("--served-model-name", MODEL, "--dtype", "float32")
    yield running
    assert running.stop() == 0


@pytest.fixture
def to_server(server: RunningServer) -> dict[str, Any]:
    """What litellm is told of every request."""
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "-",
        "temperature": 0,
        "max_tokens": 12,
    }


def test_litellm_whole_and_streamed(to_server: dict[str, Any]) -> None:
    whole = litellm.completion(messages=QUESTION, **to_server)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.completion_tokens > 0
    pieces = litellm.completion(messages=QUESTION, stream=True, **to_server)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text


async def test_litellm_async(to_server: dict[str, Any]) -> None:
    answers = await asyncio.gather(
        *(litellm.acompletion(messages=QUESTION, **to_server) for _ in range(4))
    )
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_litellm_completes_texts(to_server: dict[str, Any]) -> None:
    to_server["model"] = f"text-completion-openai/{MODEL}"
    answer = litellm.text_completion(prompt="The capital of France is", **to_server)
    assert "Paris" in answer.choices[0].text


def test_litellm_reads_our_errors(to_server: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature: must be between 0 and 2"):
        litellm.completion(messages=QUESTION, **(to_server | {"temperature": 3}))


def chat(server: RunningServer, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="-",
        model=MODEL,
        temperature=0,
        max_completion_tokens=12,
        **options,
    )


def test_langchain_whole_and_streamed(server: RunningServer) -> None:
    model = chat(server, stream_usage=True)
    whole = model.invoke("What is the capital of France?")
    assert "Paris" in whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    pieces = list(model.stream("What is the capital of France?"))
    assert "".join(piece.content for piece in pieces) == whole.content
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata)


async def test_langchain_async(server: RunningServer) -> None:
    answers = await chat(server).abatch(["What is 2 + 2?", "What is the capital of France?"])
    assert "Paris" in answers[1].content


def test_langchain_log_probabilities(server: RunningServer) -> None:
    answer = chat(server, logprobs=True, top_logprobs=2).invoke("What is the capital of France?")
    told = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in told) == answer.content
    assert all(len(token["top_logprobs"]) == 2 for token in told)
