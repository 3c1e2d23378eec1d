"""transformers' prompts and greedy answers for chats with images, in fp32."""

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tiny_vision import GRIDS
from transformers.models.smolvlm import processing_smolvlm
from transformers.processing_utils import ProcessorMixin

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
VIDEOS = ("smolvlm", "internvl", "gemma4", "gemma4_whole")  # beside those with grids


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
    images = transformers.AutoImageProcessor.from_pretrained(folder)
    settings = json.loads((folder / "processor_config.json").read_text())
    kind = processor_class(settings.pop("processor_class"))
    for name, token in NAMED_TOKENS.get(family.removesuffix("_whole"), {}).items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    if family.startswith("gemma4"):
        settings["feature_extractor"] = None
    if family in (*GRIDS, *VIDEOS):  # a processor of videos needs torchvision

        class WithoutVideos(kind):  # type: ignore[misc,valid-type]
            def check_argument_for_proper_class(self, *_: Any) -> None:
                pass

        settings["video_processor"], kind = None, WithoutVideos
    if family == "smolvlm":  # it wants a package that spells numbers, of videos' frames
        processing_smolvlm.num2words = str
    template = tokenizer.chat_template
    return kind(image_processor=images, tokenizer=tokenizer, chat_template=template, **settings)


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
        inputs = ProcessorMixin.apply_chat_template(  # SmolVLM's own looks for videos first
            self._processor,
            copy.deepcopy(messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"images_kwargs": options},
        )
        output = self._model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        prompt = inputs["input_ids"][0].tolist()
        return Answer(prompt, output[0, len(prompt) :].tolist())
