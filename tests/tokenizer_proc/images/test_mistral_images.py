"""Images in chats that mistral-common writes: their tokens are those of its own image encoder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_encoder import finish
from image_parts import data_url, encoded, image_part
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers import image as mistral_image
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_files import SPECIAL, write_tekken
from tiny_vision import picture, save_processor, vision_config

from headrace.board.board import Board, Seat
from headrace.config.model_card import read_folder
from headrace.config.process_configs import ModelCard
from headrace.errors import RequestError
from headrace.ipc.arena import Arena
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.encoding.mistral_template import MistralTemplate
from headrace.tokenizer_proc.images.images import Images
from headrace.tokenizer_proc.images.lane import load_processor
from headrace.tokenizer_proc.images.store import ImageStore
from headrace.tokenizer_proc.jobs.stages import Text
from headrace.tokenizer_proc.requests.openai import decode_chat

IMAGE = SPECIAL.index("[IMG]")
LIMITS = {"image_patch_size": 7, "max_image_size": 56, "spatial_merge_size": 2}
SIZES = [(80, 60), (20, 56), (28, 29), (13, 40)]
URLS = [data_url(encoded(picture(i, *size))) for i, size in enumerate(SIZES)]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "an image after its text": [
        {"role": "user", "content": [text("What?"), image_part(URLS[0])]},
    ],
    "images between texts": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("a"), *map(image_part, URLS[1:3]), text("b")]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [image_part(URLS[3])]},
    ],
    "texts alone": [{"role": "user", "content": "[IMG] banana"}],
}


def write_folder(path: Path, family: str, **more: Any) -> Path:
    """Write what is read of a folder before its weights, with a tekken.json alone."""
    vision_config(family).save_pretrained(path)
    config = json.loads((path / "config.json").read_text()) | {"image_token_index": IMAGE}
    (path / "config.json").write_text(json.dumps(config))
    write_tekken(path, "v13", more)
    return path


class Lane:
    """What a process that prepares images has."""

    def __init__(self, folder: Path) -> None:
        self.card: ModelCard = read_folder(folder)
        assert self.card.mistral_tokenizer is not None
        self.encoder = Encoder(self.card.tokenizer_path)
        self.template = MistralTemplate(
            self.card.mistral_tokenizer, {}, takes_images=self.card.takes_images
        )
        self.arena, board = Arena.create(1, 4 << 20), Board.create([Seat("tokenizer", 0)])
        self.images = Images(
            load_processor(folder, self.encoder),
            ImageStore(self.arena.region(0)),
            IMAGE,
            4,
            look=lambda: None,
            wait=lambda: None,
            check=lambda _: None,
            slot=board.slot("tokenizer"),
            special_tokens=self.encoder.special_tokens,
        )

    def written(self, messages: list[dict[str, Any]]) -> tuple[Text, Any]:
        request = decode_chat(json.dumps({"messages": messages}).encode())
        images = self.images.of(1, request.messages)
        prompt: Text = finish(images.written(self.template.prompt(request)), self.encoder)
        return prompt, images


def right_ids(folder: Path, messages: list[dict[str, Any]]) -> list[int]:
    """Return the prompt of a chat as mistral-common encodes it, images included."""
    tokenizer = MistralTokenizer.from_file(folder / "tekken.json")
    chat = ChatCompletionRequest.from_openai(messages)
    return tokenizer.encode_chat_completion(chat).tokens


@pytest.mark.parametrize("family", ["mistral3", "pixtral"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_with_images_are_mistral_common_s(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mistral_image, "transform_image", lambda *_: np.zeros(0))  # OpenCV's
    limits = LIMITS if family == "mistral3" else LIMITS | {"spatial_merge_size": 1}
    folder = write_folder(tmp_path, family, image=limits)
    prompt, images = Lane(folder).written(CONVERSATIONS[name])
    assert prompt.ids is not None
    assert prompt.ids.tolist() == right_ids(folder, CONVERSATIONS[name])
    images.find(prompt.ids)
    found = images._found
    assert sum(one.num_rows for one in found) == prompt.ids.tolist().count(IMAGE)
    assert all(prompt.ids[one.start] == IMAGE for one in found)


def test_a_folder_s_own_processor_goes_before_the_tekken_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "mistral3", image=LIMITS | {"max_image_size": 28})
    small, _ = Lane(folder).written(CONVERSATIONS["an image after its text"])
    save_processor(folder, "mistral3")
    large, _ = Lane(folder).written(CONVERSATIONS["an image after its text"])
    assert small.text.count("[IMG]") < large.text.count("[IMG]")


def test_a_tokenizer_of_another_image_token_takes_texts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "mistral3")
    config = json.loads((folder / "config.json").read_text()) | {"image_token_index": IMAGE + 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert not read_folder(folder).takes_images


@pytest.mark.parametrize(
    "limits", [None, {"image_patch_size": 14}, LIMITS | {"image_patch_size": 0}]
)
def test_a_folder_that_does_not_describe_images_takes_texts(
    limits: dict[str, int] | None, tmp_path: Path
) -> None:
    assert not read_folder(write_folder(tmp_path, "mistral3", image=limits)).takes_images


def test_a_text_beside_images_must_not_name_their_token(tmp_path: Path) -> None:
    lane = Lane(write_folder(tmp_path, "mistral3", image=LIMITS))
    with pytest.raises(RequestError, match=r"no text may have \[IMG\] in it"):
        lane.written([{"role": "user", "content": [text("[IMG]"), image_part(URLS[0])]}])
