"""Chats with images, from the HTTP request to the text: what is said is what transformers says."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from image_parts import data_url, encoded, image_part, message
from image_reference import generate
from servers import RunningServer, wait_until
from tiny_vision import make_vision_folder, picture

EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")
SMALL = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20))
NUM_TOKENS = 12
NUM_STORY_TOKENS = 300
TIMEOUT_S = 60
Part = str | tuple[int, int, int]  # text, or an image by its seed and size
CHATS: list[list[Part]] = [
    ["What is this? ", (1, 80, 60), "Say it in one word."],
    ["No image here, only words and words."],
    ["First ", (2, 40, 90), " then ", (3, 64, 64), (1, 80, 60), " compare."],
    ["Short."],
    [(4, 50, 50)],
]


@dataclass
class Served:
    """A small model, and a server that has it."""

    folder: Path
    model: Any
    server: RunningServer

    async def ask(self, client: httpx.AsyncClient, parts: list[Part], **fields: Any) -> Any:
        """Return the response to a chat."""
        response = await client.post("/v1/chat/completions", json=body_of(parts) | fields)
        assert response.status_code == 200, response.text
        return response.json()

    def ask_all(self, chats: list[list[Part]]) -> list[Any]:
        """Return the responses to chats that come together."""

        async def run() -> list[Any]:
            async with httpx.AsyncClient(base_url=self.server.url, timeout=TIMEOUT_S) as client:
                return await asyncio.gather(*(self.ask(client, parts) for parts in chats))

        return asyncio.run(run())

    def expected(self, parts: list[Part], prompt: list[int]) -> list[int]:
        """Return what transformers says."""
        images = [picture(*part) for part in parts if not isinstance(part, str)]
        return generate(self.model, self.folder, prompt, images, NUM_TOKENS)

    @property
    def num_encoded(self) -> float:
        """How many images have been through the tower."""
        return self.server.metric("encoded_images_total")


def body_of(parts: list[Part]) -> dict[str, Any]:
    """Return a chat of one message."""
    content = [
        part if isinstance(part, str) else image_part(data_url(encoded(picture(*part))))
        for part in parts
    ]
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    return {"messages": [message(*content)], **options}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two workers, whose steps are small enough to cut images."""
    folder = tmp_path_factory.mktemp("smolvlm")
    model = make_vision_folder(folder, "smolvlm")
    flags = ("--max-num-batched-tokens", "23", "--max-num-seqs", "4", "--tp", "2")
    server = RunningServer(str(folder), *EXACT, *SMALL, *flags)
    yield Served(folder, model, server)
    assert server.stop() == 0


def test_every_answer_is_the_reference_s(served: Served) -> None:
    for round in range(2):  # the second finds everything
        before = served.num_encoded
        answers = served.ask_all(CHATS)
        for parts, answer in zip(CHATS, answers, strict=True):
            choice = answer["choices"][0]
            assert choice["token_ids"] == served.expected(parts, answer["prompt_token_ids"])
        assert served.num_encoded - before == (4 if round == 0 else 0)


VICTIMS = ["vision 0", "tokenizer 2", "worker 1", "engine"]


@pytest.mark.parametrize("number", range(len(VICTIMS)), ids=VICTIMS)
def test_answers_are_the_same_whoever_dies(served: Served, number: int) -> None:
    chats: list[list[Part]] = [["Look: ", (100 * number + i, 70, 50), " Well?"] for i in range(3)]
    story = body_of(chats[0]) | {"max_tokens": NUM_STORY_TOKENS, "stream": True}
    victim = served.server.ring[f"headrace: {VICTIMS[number]}"]

    async def run() -> tuple[str, list[Any]]:
        async with httpx.AsyncClient(base_url=served.server.url, timeout=TIMEOUT_S) as client:
            async with client.stream("POST", "/v1/chat/completions", json=story) as response:
                lines = response.aiter_lines()
                told = [await anext(lines) for _ in range(5)]
                others = [asyncio.create_task(served.ask(client, parts)) for parts in chats[1:]]
                await asyncio.wait(others, timeout=0.01)  # some way
                victim.kill()
                told += [line async for line in lines]
            return text_of(told), await asyncio.gather(*others)

    text, answers = asyncio.run(run())
    assert not victim.is_running()
    for parts, answer in zip(chats[1:], answers, strict=True):
        expected = served.expected(parts, answer["prompt_token_ids"])
        assert answer["choices"][0]["token_ids"] == expected
    whole = httpx.post(
        f"{served.server.url}/v1/chat/completions",
        json=story | {"stream": False},
        timeout=TIMEOUT_S,
    )
    assert text == whole.json()["choices"][0]["message"]["content"]
    wait_until(lambda: is_healthy(served.server), "good health again", TIMEOUT_S)


def text_of(lines: list[str]) -> str:
    """Return the text of a stream."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert lines[-2:] == ["data: [DONE]", ""]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def is_healthy(server: RunningServer) -> bool:
    """Whether all processes serve."""
    return httpx.get(f"{server.url}/health").status_code == 200


def test_nothing_is_left_of_images(served: Served) -> None:
    metric = served.server.metric
    wait_until(lambda: metric("image_bytes_sent") == 0, "all pixels are let go of")
    assert metric("num_images_waiting") == 0
    assert metric("embedding_rows_free") == metric("embedding_rows_total") > 0
    assert metric("kv_pages_free") == metric("kv_pages_total")
