"""transformers' prompts and greedy answers for chats with images, in fp32."""

import copy
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_vision import GRIDS, joined
from transformers.models.smolvlm import processing_smolvlm
from transformers.processing_utils import ProcessorMixin
from transformers.video_utils import VideoMetadata

from headrace.tokenizer_proc.images.processor import stored_processor

# Of tokenizers: what published ones name in their settings.
NAMED_TOKENS = {
    "gemma3": {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"},
    "gemma4": {
        "image": "<|image|>",
        "boi": "<|image>",
        "eoi": "<image|>",
        "audio": "<|audio|>",
        "boa": "<|audio>",
        "eoa": "<audio|>",
    },
    "internvl": {
        "context_image": "<IMG_CONTEXT>",
        "start_image": "<img>",
        "end_image": "</img>",
        "video": "<video>",
    },
}
# Families whose processors take what is there no class for, beside those with grids: videos, or
# images without torchvision.
UNCHECKED = ("smolvlm", "internvl", "gemma4", "gemma4_whole", "lfm2_vl")
NUMBERS = {1: "one", 3: "three", 21: "twenty-one", 120: "one hundred and twenty"}


class TilesOfLfm2(transformers.ImageProcessingMixin):
    """LFM2-VL's image processor, as transformers' processor of prompts has it: ours."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._process = stored_processor(folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_process"], name)

    def __call__(self, images: list[list[Image.Image]], **options: Any) -> dict[str, Any]:
        taken = {"do_image_splitting": options.get("do_image_splitting")}
        flat = [image for several in images for image in several]
        made = [self._process(image, **taken) for image in flat]
        joint = {name: torch.from_numpy(joined([one[name] for one in made])) for name in made[0]}
        sizes = [self._process.whole_size(image.size)[::-1] for image in flat]
        return joint | {"image_sizes": sizes}


class Answer(NamedTuple):
    """Token ids."""

    prompt: list[int]
    tokens: list[int]


def processor_class(name: str) -> Any:
    """Return a class of processors. Pixtral's has a module that needs torchvision, for nothing."""
    if name != "PixtralProcessor":
        return getattr(transformers, name)
    models = "transformers.models.pixtral"
    pil = importlib.import_module(f"{models}.image_processing_pil_pixtral")
    sys.modules.setdefault(f"{models}.image_processing_pixtral", pil)
    return getattr(importlib.import_module(f"{models}.processing_pixtral"), name)


def transformers_processor(folder: Path, family: str) -> Any:
    """Return transformers' own processor of prompts with images."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    is_own = family == "lfm2_vl"
    images = (
        TilesOfLfm2(folder) if is_own else transformers.AutoImageProcessor.from_pretrained(folder)
    )
    settings = json.loads((folder / "processor_config.json").read_text())
    kind = processor_class(settings.pop("processor_class"))
    for name, token in NAMED_TOKENS.get(family.removesuffix("_whole"), {}).items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    if family.startswith("gemma4"):
        settings["feature_extractor"] = None
    if family in (*GRIDS, *UNCHECKED):

        class WithoutVideos(kind):  # type: ignore[misc,valid-type]
            def check_argument_for_proper_class(self, *_: Any) -> None:
                pass

        settings |= {} if is_own else {"video_processor": None}
        kind = WithoutVideos
    if family == "smolvlm":  # it wants a package that spells numbers, of videos' frames
        processing_smolvlm.num2words = NUMBERS.get
    template = tokenizer.chat_template
    return kind(image_processor=images, tokenizer=tokenizer, chat_template=template, **settings)


def video_text(processor: Any, num_frames: int, **metadata: Any) -> str:
    """Return what SmolVLM's processor of transformers writes for a video's frames."""
    made = {
        "pixel_values": np.zeros((1, num_frames, 1)),
        "video_metadata": [VideoMetadata(**metadata)],
    }
    text: str = processor.replace_video_token(made, 0)
    return text


def prefix_inputs(processor: Any, messages: list[Any]) -> Any:
    """Return a prompt of PaliGemma, whose processor knows no chats, nor texts alone."""
    parts = [part for message in messages for part in message["content"]]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    options = {"return_tensors": "pt", "add_special_tokens": False}
    if urls:
        images = [[transformers.image_utils.load_image(url) for url in urls]]
        inputs = processor(images=images, text=[text], **options)
        return {name: inputs[name] for name in inputs if name != "labels"}
    tokenizer = processor.tokenizer
    inputs = tokenizer(f"{tokenizer.bos_token}{text}\n", **options)
    return {**inputs, "token_type_ids": torch.zeros_like(inputs["input_ids"])}


class Reference:
    """A model that takes images, and its own processor."""

    def __init__(self, model: Any, folder: Path, family: str) -> None:
        self._model = model
        self._processor = transformers_processor(folder, family)

    @torch.inference_mode()
    def answer(self, messages: list[Any], num_tokens: int, **options: Any) -> Answer:
        """Return the prompt of a chat, as OpenAI's API has it, and its greedy continuation.

        Args:
            options: of the image processor.
        """
        inputs = self._inputs(messages, options)
        output = self._model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        prompt = inputs["input_ids"][0].tolist()
        return Answer(prompt, output[0, len(prompt) :].tolist())

    def _inputs(self, messages: list[Any], options: dict[str, Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # some make arrays of tensors
            if self._processor.chat_template is None:
                return prefix_inputs(self._processor, messages)
            return ProcessorMixin.apply_chat_template(  # SmolVLM's own looks for videos first
                self._processor,
                copy.deepcopy(messages),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs={"images_kwargs": options},
            )

    @torch.inference_mode()
    def watch(
        self, before: str, frames: list[Image.Image], num_tokens: int, **metadata: Any
    ) -> Answer:
        """Return SmolVLM's prompt and answer to a user's text and a video after it.

        Its processor of videos needs torchvision. Frames are images that are not split.

        Args:
            metadata: of the video, as transformers has it.
        """
        processor = self._processor
        content = [{"type": "text", "text": before}, {"type": "video"}]
        text = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=processing_smolvlm.DEFAULT_CHAT_TEMPLATE,
            add_generation_prompt=True,
            tokenize=False,
        )
        text = text.replace("<video>", video_text(processor, len(frames), **metadata))
        inputs = processor.tokenizer(text, return_tensors="pt")
        pixels = processor.image_processor(frames, do_image_splitting=False, return_tensors="pt")
        output = self._model.generate(
            **inputs, **pixels, max_new_tokens=num_tokens, do_sample=False
        )
        prompt = inputs["input_ids"][0].tolist()
        return Answer(prompt, output[0, len(prompt) :].tolist())
