"""What transformers generates of prompts with images, in fp32."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tiny_vision import IMAGE_TOKEN, prepare

NAMES = ("pixel_values", "pixel_attention_mask", "image_grid_thw")


@torch.inference_mode()
def generate(
    model: Any, folder: Path, prompt: list[int], images: list[Image.Image], num_tokens: int
) -> list[int]:
    """Return the greedy continuation of a prompt, with its images in order."""
    ids = torch.tensor([prompt])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prepared = [prepare(folder, image) for image in images]
    for name in NAMES:
        parts = [torch.from_numpy(image[name]) for image in prepared if name in image]
        if parts:
            has_tiles = parts[0].ndim > 3 and prepared[0]["pixel_values"].ndim == 5
            inputs[name] = torch.cat(parts, dim=1 if has_tiles else 0)
    types = {"qwen2_5_vl": "mm_token_type_ids", "gemma3": "token_type_ids"}
    if model.config.model_type in types:
        inputs[types[model.config.model_type]] = (ids == IMAGE_TOKEN).long()
    output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated
