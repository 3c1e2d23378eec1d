"""Chats with images, from the HTTP request to the text: what is said is what transformers says."""

import asyncio
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family_table
import httpx
import pytest
from hostile_images import BAD, THIN
from image_parts import data_url, encoded, image_part, message, video_part
from image_reference import Reference
from mutants.mutants import interpreted
from PIL import Image
from servers import HELD, WITHOUT_TORCH, RunningServer, wait_until
from tiny_vision import FAMILIES, make_vision_folder, picture

from headrace.client.client import Client
from headrace.errors import ApiError

EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")
SMALL = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20))
CUTTING = ("--max-num-batched-tokens", "23", "--max-num-seqs", "4")  # images of a step
PATH = "/v1/chat/completions"
NUM_TOKENS = 12
PAGE_TOKENS = 32
NUM_STORY_TOKENS = 300
TIMEOUT_S = 300
ADMIN_KEY = "operators-only"
# Families but that of `served`; `make families` has those that are not here, too.
SHORT = ("smolvlm", "gemma3", "lfm2_vl")
OTHERS = [family for family in FAMILIES if family != "qwen3_vl"]
STATES = ("qwen3_5", "lfm2_vl")  # families whose decoders are hybrids
UNCACHED = (*STATES, "paligemma", "paligemma2")  # prefixes are found in places, or not at all
# Families whose towers the core runs.
IN_CORE = ("smolvlm", "idefics3", "gemma3", "lfm2_vl", "paligemma", "paligemma2")
UNCUT = {"do_image_splitting": False}
LOW: dict[str, dict[str, Any]] = {  # others see no less
    "smolvlm": UNCUT,
    "idefics3": UNCUT,
    "lfm2_vl": UNCUT,
    "internvl": {"crop_to_patches": False},
}
FLAGS = {"gemma4_whole": ("--max-num-batched-tokens", "128")}  # no step has a part of an image
Messages = list[dict[str, Any]]


def shown(seed: int, width: int, height: int, **fields: Any) -> dict[str, Any]:
    """Return a part that is an image."""
    return image_part(data_url(encoded(picture(seed, width, height))), **fields)


LOOK = [message("What is this? ", shown(1, 80, 60), "Say it in one word.")]
LOOK_ELSEWHERE = [message("What is this? ", shown(5, 80, 60), "Say it in one word.")]
LOOK_BRIEFLY = [message(shown(1, 80, 60, detail="low"), "Well?")]
CHATS: list[Messages] = [
    LOOK,
    [message("No image here,", " only words and words.")],
    [message("First ", shown(2, 40, 90), " then ", shown(3, 64, 64), shown(1, 80, 60), "?")],
    [message("Short.")],
    LOOK_ELSEWHERE,
    [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        message(shown(4, 50, 50)),
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        message("And here? ", shown(2, 40, 90)),
    ],
]
NUM_PICTURES = 5  # in them, each shown once or more


@dataclass
class Served:
    """A small model, and a server that has it."""

    reference: Reference
    server: RunningServer

    @classmethod
    def start(
        cls, folder: Path, family: str, *flags: str, env: dict[str, str] | None = None
    ) -> "Served":
        """Make a model of a family, and serve it."""
        model = make_vision_folder(folder, family)
        server = RunningServer(str(folder), *EXACT, *SMALL, *CUTTING, *flags, env=env)
        return cls(Reference(model, folder, family), server)

    async def ask(self, client: httpx.AsyncClient, chat: Messages, **fields: Any) -> Any:
        """Return the response to a chat."""
        response = await client.post("/v1/chat/completions", json=body_of(chat) | fields)
        assert response.status_code == 200, response.text
        return response.json()

    def ask_all(self, chats: list[Messages]) -> list[Any]:
        """Return the responses to chats that come together."""

        async def run() -> list[Any]:
            async with httpx.AsyncClient(base_url=self.server.url, timeout=TIMEOUT_S) as client:
                return await asyncio.gather(*(self.ask(client, chat) for chat in chats))

        return asyncio.run(run())

    def check(self, chat: Messages, answer: Any, **options: Any) -> None:
        """An answer, and the prompt that it is to, are those of transformers."""
        expected = self.reference.answer(chat, NUM_TOKENS, **options)
        assert answer["prompt_token_ids"] == expected.prompt
        assert answer["choices"][0]["token_ids"] == expected.tokens

    def counted(self) -> tuple[float, float]:
        """Return how many images have been prepared, and how many have been through the tower."""
        metric = self.server.metric
        return metric("images_total") - metric("images_found_total"), metric("encoded_images_total")


def body_of(chat: Messages) -> dict[str, Any]:
    """Return a request."""
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    return {"messages": chat, **options}


def check_twice(served: Served, is_uncached: bool = False) -> None:
    """All chats are answered as by transformers, and so they are with what is found again.

    Args:
        is_uncached: prefixes are not found page by page.
    """
    texts = []
    for num_new in (NUM_PICTURES, 0):
        before = served.counted()
        answers = served.ask_all(CHATS)
        for chat, answer in zip(CHATS, answers, strict=True):
            served.check(chat, answer)
        prepared, seen = (b - a for a, b in zip(before, served.counted(), strict=True))
        assert (prepared, seen) == (num_new, num_new)
        texts.append([answer["choices"][0]["token_ids"] for answer in answers])
    assert texts[0] == texts[1]
    said = dict(zip(map(id, CHATS), texts[0], strict=True))
    assert said[id(LOOK)] != said[id(LOOK_ELSEWHERE)]
    for answer in [] if is_uncached else answers:
        usage = answer["usage"]
        assert (
            usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - PAGE_TOKENS
        )


def check_hostile_images(served: Served) -> None:
    """Images that lie are refused, and thin ones too or seen as by transformers.

    Health lasts, and a chat that comes behind them is answered.
    """

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=served.server.url, timeout=TIMEOUT_S) as client:
            posts = [client.post("/v1/chat/completions", json=body_of(chat)) for chat in chats]
            asking = asyncio.gather(*posts)
            while not asking.done():
                assert (await client.get("/health")).status_code == 200
            return await asking

    thin = [[message(shown(6, *size), "Well?")] for size in THIN]
    chats = [*([message(image_part(url))] for url, _ in BAD), *thin, LOOK]
    *answers, last = asyncio.run(run())
    served.check(LOOK, last.json())
    for (_, why), answer in zip(BAD, answers, strict=False):
        assert (answer.status_code, why in answer.text) == (400, True), answer.text
    for chat, answer in zip(thin, answers[len(BAD) :], strict=True):
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 200:
            served.check(chat, answer.json())


def check_video(served: Served) -> None:
    """Frames of a video are seen as by transformers, at their times; bad ones are named."""
    pictures = [picture(seed, 80, 60) for seed in (1, 2, 3)]
    part = video_part(*pictures)
    video = {"fps": 2.0, "frames_indices": [0, 5, 130], "total_num_frames": 200}
    body = body_of([message("Look: ", part)]) | {"media_io_kwargs": {"video": video}}
    answer = httpx.post(f"{served.server.url}{PATH}", json=body, timeout=TIMEOUT_S).json()
    frames = [Image.open(io.BytesIO(encoded(one, "JPEG"))) for one in pictures]
    expected = served.reference.watch("Look: ", frames, NUM_TOKENS, **video, duration=100.0)
    assert answer["prompt_token_ids"] == expected.prompt
    assert answer["choices"][0]["token_ids"] == expected.tokens
    part["video_url"]["url"] += ",AAAA"
    refused = httpx.post(f"{served.server.url}{PATH}", json=body_of([message(part)]))
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "messages[0].content[0].video_url[3]",
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two workers."""
    flags = ("--tp", "2", "--admin-api-key", ADMIN_KEY, *HELD)
    served = Served.start(tmp_path_factory.mktemp("qwen"), "qwen3_vl", *flags)
    yield served
    assert served.server.stop() == 0


@pytest.fixture(params=OTHERS)
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Served, str]]:
    """A server of another family's model."""
    family: str = request.param
    if family not in SHORT and not family_table.WRITES:
        pytest.skip("`make families` serves it")
    env = WITHOUT_TORCH if family in IN_CORE else None
    served = Served.start(tmp_path, family, "--tp", "2", *FLAGS.get(family, ()), env=env)
    yield served, family
    assert served.server.stop() == 0


def test_every_answer_is_the_reference_s(served: Served) -> None:
    check_twice(served)
    check_hostile_images(served)


def test_every_family_s_answers_are_the_reference_s(other: tuple[Served, str]) -> None:
    served, family = other
    check_twice(served, family in UNCACHED)
    (answer,) = served.ask_all([LOOK_BRIEFLY])
    served.check(LOOK_BRIEFLY, answer, **LOW.get(family, {}))
    if family == "smolvlm":
        check_video(served)
    check_hostile_images(served)
    check_nothing_is_left(served.server)


def test_caches_of_images_are_reset_by_operators(served: Served) -> None:
    def check_added(*expected: int) -> None:
        """A prompt whose pages are cached may be answered before its image is encoded."""
        before = served.counted()
        (answer,) = served.ask_all([LOOK])
        served.check(LOOK, answer)
        whole = tuple(a + b for a, b in zip(before, expected, strict=True))
        wait_until(lambda: served.counted() == whole, f"{before} and {expected} are counted")

    served.check(LOOK, *served.ask_all([LOOK]))
    with Client(served.server.url, ADMIN_KEY) as client:
        check_added(0, 0)
        client.reset_mm_cache()
        check_added(1, 0)
        client.reset_encoder_cache()
        check_added(0, 1)
    with Client(served.server.url) as client, pytest.raises(ApiError, match="admin"):
        client.reset_mm_cache()
    check_added(0, 0)


def test_answers_by_kernels_of_gpus_are_the_reference_s(tmp_path: Path) -> None:
    flags = ("--device", "cuda", "--tp", "2", "--enforce-eager")
    served = Served.start(tmp_path, "qwen2_5_vl", *flags, env=interpreted())
    (answer,) = served.ask_all([LOOK])
    served.check(LOOK, answer)
    assert "runs on GPUs: --device says so" in served.server.log
    check_nothing_is_left(served.server)
    assert served.server.stop() == 0


VICTIMS = ["vision 0", "tokenizer 2", "worker 1", "engine"]


@pytest.mark.parametrize("number", range(len(VICTIMS)), ids=VICTIMS)
def test_responses_are_the_same_whatever_dies(served: Served, number: int) -> None:
    chats = [[message("Look: ", shown(100 * number + i, 70, 50), " Well?")] for i in range(3)]
    story = body_of(chats[0]) | {"max_tokens": NUM_STORY_TOKENS, "stream": True}
    victim = served.server.ring[f"headrace: {VICTIMS[number]}"]

    async def run() -> tuple[str, list[Any]]:
        async with httpx.AsyncClient(base_url=served.server.url, timeout=TIMEOUT_S) as client:
            async with client.stream("POST", "/v1/chat/completions", json=story) as response:
                lines = response.aiter_lines()
                told = [await anext(lines) for _ in range(5)]
                others = [asyncio.create_task(served.ask(client, chat)) for chat in chats[1:]]
                await asyncio.wait(others, timeout=0.01)  # some way
                victim.kill()
                told += [line async for line in lines]
            return text_of(told), await asyncio.gather(*others)

    text, answers = asyncio.run(run())
    wait_until(lambda: not victim.is_running(), "it is replaced")
    for chat, answer in zip(chats[1:], answers, strict=True):
        served.check(chat, answer)
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


def encode_at_once(server: RunningServer, first_seed: int) -> float:
    """Have five images wait; return in how many batches they are encoded."""
    vision, metric = server.ring["headrace: vision 0"], server.metric
    num_images = 5
    chats = [body_of([message(shown(first_seed + i, 80, 60), "Well?")]) for i in range(num_images)]
    encoded, batches = metric("encoded_images_total"), metric("encoder_batches_total")

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
            vision.suspend()
            posts = [client.post("/v1/chat/completions", json=chat) for chat in chats]
            answers = asyncio.gather(*posts)
            waiting = "all images wait"
            await asyncio.to_thread(
                wait_until, lambda: metric("num_images_waiting") == num_images, waiting, TIMEOUT_S
            )
            vision.resume()
            return await answers

    assert [answer.status_code for answer in asyncio.run(run())] == [200] * num_images
    assert metric("encoded_images_total") - encoded == num_images
    return metric("encoder_batches_total") - batches


def test_images_that_wait_are_encoded_together(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "llava")
    server = RunningServer(str(tmp_path), *SMALL, *HELD)
    assert encode_at_once(server, 0) in (1, 2)  # two where the first is asked for alone
    assert server.stop() == 0


def test_images_are_encoded_one_by_one_in_exact_mode(served: Served) -> None:
    assert encode_at_once(served.server, 50) == 5


def test_images_are_encoded_once_over_restarts(tmp_path: Path) -> None:
    make_vision_folder(tmp_path / "model", "gemma3")
    flags = (*EXACT, *SMALL, "--kv-store", str(tmp_path / "store"), "--kv-store-disk-bytes", "64M")
    texts = []
    for num_stored in (0, 1):
        server = RunningServer(str(tmp_path / "model"), *flags, env=WITHOUT_TORCH)
        url = f"{server.url}/v1/chat/completions"
        texts.append(httpx.post(url, json=body_of(LOOK), timeout=TIMEOUT_S).json()["choices"])
        assert server.metric("encoder_store_hits_total") == num_stored
        assert server.metric("encoded_images_total") == 1 - num_stored
        check_nothing_is_left(server)
        assert server.stop() == 0
    assert texts[0] == texts[1]


def test_nothing_is_left_of_images(served: Served) -> None:
    check_nothing_is_left(served.server)


def check_nothing_is_left(server: RunningServer) -> None:
    """All pixels, rows and pages are given back."""
    metric = server.metric
    server.settle()
    wait_until(lambda: metric("image_bytes_sent") == 0, "all pixels are let go of")
    wait_until(lambda: metric("num_images_waiting") == 0, "no image waits")
    server.await_free("embedding_rows")
    server.await_free("kv_pages")
