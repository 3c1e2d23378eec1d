"""The images of a chat reach the engine with their places in the prompt, once per sequence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_encoder import finish
from image_parts import data_url, encoded, image_part, message
from planners import Echo
from tiny_vision import IMAGE_TOKEN, picture

from headrace.board.board import Board, Seat
from headrace.board.fields import TokenizerField
from headrace.config.model_card import read_folder
from headrace.errors import InvalidValue, RequestError, Unsupported
from headrace.ipc.arena import Arena
from headrace.ipc.messages import GenerateRequest, HttpRequest, request_id
from headrace.tokenizer_proc.encoding.chat_template import ChatTemplate
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.generation import GenerationPlanner
from headrace.tokenizer_proc.images.images import Images
from headrace.tokenizer_proc.images.lane import load_processor
from headrace.tokenizer_proc.images.store import ImageStore
from headrace.tokenizer_proc.jobs.aborts import Abandoned
from headrace.tokenizer_proc.jobs.stages import Ids, Sequences
from headrace.tokenizer_proc.tokenize_routes import TokenRoutes

HTTP = HttpRequest(request_id(0, 5), "POST", "/v1/chat/completions", 0.0)
FIRST, SECOND = (image_part(data_url(encoded(picture(i, 90, 60)))) for i in (1, 2))
Object = dict[str, Any]


class Lane:
    """What a process that prepares images has, and an engine that needs none of them for long."""

    def __init__(self, folder: Path, region_bytes: int = 4 << 20) -> None:
        card = read_folder(folder)
        assert card.image_token == IMAGE_TOKEN
        self.encoder = Encoder(card.path)
        self.arena = Arena.create(1, region_bytes)
        self.board = Board.create([Seat("tokenizer", 0)])
        self.slot = self.board.slot("tokenizer")
        processor = load_processor(folder, self.encoder)
        self.store = ImageStore(self.arena.region(0))
        self.sent: list[GenerateRequest] = []
        self.num_looks = 0
        self.gone_at = -1  # how many images have been looked for when a client leaves
        images = Images(
            processor,
            self.store,
            IMAGE_TOKEN,
            4,
            look=self._look,
            wait=self._wait,
            check=self._check,
            slot=self.slot,
        )
        template = ChatTemplate(card.chat_template, {}, takes_images=True)
        grammars: Any = Grammars()
        self.planner = GenerationPlanner(card, template, self.encoder, 1, 0, grammars, images)
        self.tokens = TokenRoutes(card, template, self.encoder, images)
        self.short = GenerationPlanner(card, template, self.encoder, 1, 0, grammars)

    def _look(self) -> None:
        self.num_looks += 1

    def _wait(self) -> None:
        self.release()

    def _check(self, request: int) -> None:
        assert request == HTTP.id
        if self.slot[TokenizerField.IMAGES] == self.gone_at:
            raise Abandoned

    def release(self) -> None:
        """Be done with all images, as the engine."""
        for request in self.sent:
            for image in request.images:
                for tensor in image.tensors.values():
                    self.arena.release(tensor)
        self.sent.clear()

    def chat(self, *messages: Object, planner: Any = None, **fields: Any) -> Sequences:
        body = json.dumps({"messages": list(messages), "max_tokens": 5} | fields).encode()
        found = finish((planner or self.planner).chat(HTTP, body), self.encoder)
        assert isinstance(found, Sequences)
        self.sent += found.requests
        return found


class Grammars(Echo):
    """Grammars that are looked into while others' requests come; `meanwhile` is what they do."""

    meanwhile: Callable[[], object] | None = None

    def compiled(self, param: str, constraint: Any) -> Any:
        yield []
        if Grammars.meanwhile is not None:
            Grammars.meanwhile()
        return b"grammar"


@pytest.fixture(scope="module")
def folder(vision_folder: Callable[[str], Path]) -> Path:
    return vision_folder("smolvlm")


@pytest.fixture
def lane(folder: Path) -> Lane:
    return Lane(folder)


def rows(ids: Ids) -> list[int]:
    return [place for place, id in enumerate(ids) if id == IMAGE_TOKEN]


def test_images_are_where_the_tokens_of_their_rows_are(lane: Lane) -> None:
    planned = lane.chat(message("a", FIRST, "b", SECOND), message(FIRST))
    (request,), (prompt,) = planned.requests, planned.prompts
    places = rows(prompt)
    first, second, third = request.images
    assert [image.num_rows for image in request.images] == [len(places) // 3] * 3
    for image in request.images:
        inside = [p for p in places if image.start <= p < image.start + image.num_tokens]
        assert len(inside) == image.num_rows
        assert (inside[0], inside[-1]) == (image.start, image.start + image.num_tokens - 1)
    assert first.start < second.start < third.start
    assert first.key == third.key != second.key
    assert first.tensors == third.tensors != second.tensors
    text = lane.encoder.decode(list(prompt), skip_special_tokens=False)
    assert text.startswith("<|im_start|>User: a<fake_token_around_image>")
    assert text.endswith("<fake_token_around_image><end_of_utterance>\nAssistant:")


def test_engine_must_release_each_image_of_each_sequence(lane: Lane) -> None:
    planned = lane.chat(message(FIRST, FIRST, SECOND), n=3)
    assert len(planned.requests) == 3
    assert lane.store.sent_bytes() == lane.store.num_bytes > 0
    for request in planned.requests:
        assert lane.store.sent_bytes() == lane.store.num_bytes
        lane.sent = [request]
        lane.release()
    assert lane.store.sent_bytes() == 0 < lane.store.num_bytes
    assert lane.num_looks > 0


def test_an_image_is_prepared_once(lane: Lane) -> None:
    for _ in range(3):
        lane.chat(message(FIRST, SECOND))
    assert lane.slot[TokenizerField.IMAGES] == 6
    assert lane.slot[TokenizerField.FOUND_IMAGES] == 4


def test_only_those_of_the_same_salt_find_an_image(lane: Lane) -> None:
    keys = [
        lane.chat(message(FIRST), **fields).requests[0].images[0].key
        for fields in ({}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": "yours"})
    ]
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3
    assert (lane.slot[TokenizerField.IMAGES], lane.slot[TokenizerField.FOUND_IMAGES]) == (4, 1)


def test_pixels_are_in_the_arena(lane: Lane) -> None:
    image = lane.chat(message(FIRST)).requests[0].images[0]
    tensor = image.tensors["pixel_values"]
    pixels = np.frombuffer(lane.arena.read(tensor), tensor.dtype).reshape(tensor.shape)
    assert pixels.shape[1:] == (3, 32, 32)
    assert -1 <= pixels.min() < pixels.max() <= 1


def test_a_text_is_as_without_images(lane: Lane) -> None:
    text = {"role": "user", "content": "What is <image>?"}
    planned, short = lane.chat(text), lane.chat(text, planner=lane.short)
    assert list(planned.prompts[0]) == list(short.prompts[0])
    assert not planned.requests[0].images


@pytest.mark.parametrize("text", ["<image>", "an <image> here"])
def test_a_text_beside_images_must_not_have_their_token(lane: Lane, text: str) -> None:
    with pytest.raises(InvalidValue, match=r"2 places where its images need 1; .*<image>") as no:
        lane.chat(message(FIRST, text))
    assert no.value.param == "messages"


def test_the_rows_of_images_count_as_prompt(lane: Lane) -> None:
    planned = lane.chat(message(FIRST), max_tokens=5000)
    assert planned.requests[0].max_tokens == 1024 - len(planned.prompts[0])
    assert planned.requests[0].max_tokens < 1000
    with pytest.raises(Unsupported, match="truncate_prompt_tokens: images are not cut"):
        lane.chat(message(FIRST), truncate_prompt_tokens=10)


def test_images_that_never_fit_are_refused_by_their_part(folder: Path) -> None:
    lane = Lane(folder, region_bytes=100_000)
    lane.chat(message(FIRST))
    with pytest.raises(
        InvalidValue, match=r"^messages\[0\]\.content\[0\].image_url: with those af"
    ):
        lane.chat(message(FIRST, SECOND))
    lane.chat(message(SECOND))


def test_images_that_fit_fit_wherever_others_were(folder: Path) -> None:
    lane = Lane(folder, region_bytes=150_000)  # two images, and not between others
    third = image_part(data_url(encoded(picture(3, 90, 40))))
    lane.chat(message(third))
    lane.chat(message(FIRST))
    lane.release()
    request = lane.chat(message(FIRST, SECOND)).requests[0]
    assert all(lane.arena.holds(t) for image in request.images for t in image.tensors.values())


def test_evicted_image_of_a_parked_request_is_prepared_again(folder: Path) -> None:
    lane = Lane(folder, region_bytes=100_000)
    Grammars.meanwhile = lambda: [lane.chat(message(SECOND)), lane.release()]
    try:
        format = {"type": "json_object"}
        image = lane.chat(message(FIRST), response_format=format).requests[0].images[0]
    finally:
        Grammars.meanwhile = None
    assert lane.slot[TokenizerField.IMAGES] == 3 and lane.slot[TokenizerField.FOUND_IMAGES] == 0
    assert all(lane.arena.holds(tensor) for tensor in image.tensors.values())
    assert lane.store.sent_bytes() == lane.store.num_bytes


def test_disconnect_ends_image_preparation(lane: Lane) -> None:
    lane.gone_at = 1
    with pytest.raises(Abandoned):
        lane.chat(message(FIRST, SECOND))
    assert lane.slot[TokenizerField.IMAGES] == 1
    assert lane.store.sent_bytes() == 0
    lane.gone_at = -1
    lane.chat(message(FIRST, SECOND))
    assert (lane.slot[TokenizerField.IMAGES], lane.slot[TokenizerField.FOUND_IMAGES]) == (3, 1)
    lane.release()
    assert lane.store.sent_bytes() == 0


def test_disconnect_ends_the_wait_for_room(folder: Path) -> None:
    lane = Lane(folder, region_bytes=100_000)
    lane.chat(message(FIRST))
    sent, lane.sent = lane.sent, []
    lane.gone_at = 2  # when it has been prepared
    with pytest.raises(Abandoned):
        lane.chat(message(SECOND))
    lane.gone_at, lane.sent = -1, sent
    lane.release()
    lane.chat(message(SECOND))


def test_a_process_without_images_says_why(lane: Lane) -> None:
    with pytest.raises(Unsupported, match=r"image_url: images are found by the name 'image_url'"):
        lane.chat(message(FIRST), planner=lane.short)


def responses(*parts: Object | str) -> Object:
    """Return a body of `/v1/responses`."""
    content = [
        {"type": "input_text", "text": part}
        if isinstance(part, str)
        else {"type": "input_image", **part["image_url"], "image_url": part["image_url"]["url"]}
        for part in parts
    ]
    return {"instructions": "Be kind.", "input": [{"role": "user", "content": content}]}


def block(part: Object | str) -> Object:
    """Return a block of a message of Anthropic's."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    head, _, data = part["image_url"]["url"].partition(";base64,")
    kind = head.removeprefix("data:")
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": kind, "data": data}
        if data
        else {"type": "url", "url": head},
    }


def messages(*parts: Object | str) -> Object:
    """Return a body of `/v1/messages`."""
    content = [block(part) for part in parts]
    said = [{"role": "user", "content": content}]
    return {"system": "Be kind.", "messages": said, "max_tokens": 5}


APIS = {"responses": responses, "messages": messages}


@pytest.mark.parametrize("api", APIS)
def test_images_of_other_apis_are_a_chats(lane: Lane, api: str) -> None:
    parts = ("a", FIRST, "b", SECOND)
    handle, body = getattr(lane.planner, api), APIS[api](*parts)
    planned = finish(handle(HTTP, json.dumps(body).encode()), lane.encoder)
    expected = lane.chat({"role": "system", "content": "Be kind."}, message(*parts))
    assert list(planned.prompts[0]) == list(expected.prompts[0])
    keys = [[image.key for image in found.requests[0].images] for found in (planned, expected)]
    assert keys[0] == keys[1]


def test_detail_of_responses_is_a_chats(lane: Lane) -> None:
    low = image_part(FIRST["image_url"]["url"], detail="low")
    body = json.dumps(responses("a", low)).encode()
    (prompt,) = finish(lane.planner.responses(HTTP, body), lane.encoder).prompts
    system = {"role": "system", "content": "Be kind."}
    full, expected = (lane.chat(system, message("a", part)).prompts[0] for part in (FIRST, low))
    assert list(prompt) == list(expected)
    assert len(prompt) < len(full)


def test_images_of_messages_are_counted(lane: Lane) -> None:
    body = {"messages": [{"role": "user", "content": [block("a"), block(FIRST)]}]}
    answer = finish(lane.planner.count_tokens(HTTP, json.dumps(body).encode()), lane.encoder)
    planned = lane.chat(message("a", FIRST))
    assert json.loads(answer.body) == {"input_tokens": len(planned.prompts[0])}


def test_a_tool_may_answer_with_an_image(lane: Lane) -> None:
    call = {"type": "tool_use", "id": "x", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [block("a"), block(FIRST)]}
    body = messages("Look.")
    body["messages"] += [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "user", "content": [block(SECOND)]},
        {"role": "user", "content": "Well?"},
    ]
    planned = finish(lane.planner.messages(HTTP, json.dumps(body).encode()), lane.encoder)
    text = lane.encoder.decode(list(planned.prompts[0]), skip_special_tokens=False)
    assert "Tool: a<fake_token_around_image>" in text
    assert "User:<fake_token_around_image>" in text
    assert text.endswith("<fake_token_around_image>Well?<end_of_utterance>\nAssistant:")
    assert len(planned.requests[0].images) == 2


@pytest.mark.parametrize(
    ("api", "url", "says"),
    [
        ("responses", "data:image/png;base64,!!!", "input[0].content[1].image_url: is not base64"),
        ("messages", "data:image/png;base64,!!!", "messages[0].content[1].source: is not base64"),
        ("responses", "http://x/", "input[0].content[1].image_url: this server fetches nothing"),
        ("messages", "http://x/", "messages[0].content[1].source: this server fetches nothing"),
    ],
)
def test_a_bad_image_is_named_as_its_client_wrote_it(
    lane: Lane, api: str, url: str, says: str
) -> None:
    body = json.dumps(APIS[api]("look", image_part(url))).encode()
    with pytest.raises(RequestError) as refused:
        finish(getattr(lane.planner, api)(HTTP, body), lane.encoder)
    assert str(refused.value).startswith(says)
    assert refused.value.param == says.partition(":")[0]


def test_a_bad_detail_is_named_as_its_client_wrote_it(lane: Lane) -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,", "detail": "most"}
    body = json.dumps({"input": [{"role": "user", "content": [part]}]}).encode()
    with pytest.raises(InvalidValue, match=r"^input\[0\].content\[0\].detail: must be one of"):
        finish(lane.planner.responses(HTTP, body), lane.encoder)


def test_an_image_without_a_source_is_refused(lane: Lane) -> None:
    body = messages("look")
    body["messages"][0]["content"].append({"type": "image", "source": {"type": "file"}})
    with pytest.raises(InvalidValue, match=r"^messages\[0\].content\[1\].source: must have 'type'"):
        finish(lane.planner.messages(HTTP, json.dumps(body).encode()), lane.encoder)


def test_tokens_of_images_are_reported(lane: Lane) -> None:
    body = json.dumps({"messages": [message("a", FIRST)]}).encode()
    answer = finish(lane.tokens.tokenize(HTTP, body), lane.encoder)
    planned = lane.chat(message("a", FIRST))
    assert json.loads(answer.body)["tokens"] == list(planned.prompts[0])
