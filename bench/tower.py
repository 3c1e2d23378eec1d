"""Measure the gain of encoding images in one call of a vision tower, on a CPU.

Method: towers of published sizes with random weights, a quarter of their layers, which are all
        alike. The same images go through one by one and then 2 and 4 in a call, in turns.
Run:    python bench/tower.py --rounds 5
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from headrace.engine_proc.vision.tower import Tensors, Tower
from support.report import Quantity, Report, parser

COUNTS = (1, 2, 4)
DECODER = {"num_hidden_layers": 0, "vocab_size": 1, "layer_types": [], "pad_token_id": None}
LLAVA = {
    "model_type": "clip_vision_model",
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6},
    **{"num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768},
}
QWEN = {
    **{"depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
    **{"out_hidden_size": 2048, "fullatt_block_indexes": [7]},
}
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}


def tower_of(family: str, vision: dict[str, Any], **text: Any) -> Tower:
    """Return a tower with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, vision_config=vision, text_config=DECODER | text
    )
    return Tower(transformers.AutoModel.from_config(config, dtype=torch.float32).eval())


def patches(height: int, width: int) -> Tensors:
    """Return an image for Qwen2.5-VL."""
    grid = np.array([[1, height, width]])
    return {"pixel_values": pixels(height * width, 1176), "image_grid_thw": grid}


def pixels(*shape: int) -> npt.NDArray[np.float32]:
    """Return random pixels."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def measure(name: str, tower: Tower, image: Tensors, rounds: int) -> Quantity:
    """Return milliseconds per image; the first round is thrown away."""
    samples: dict[str, list[float]] = {f"{count} in a call": [] for count in COUNTS}
    for _ in range(rounds + 1):
        for count, taken in zip(COUNTS, samples.values(), strict=True):
            start = time.perf_counter()
            tower.encode([image] * count)
            taken.append((time.perf_counter() - start) * 1e3 / count)
    return Quantity(name, "ms per image", {system: taken[1:] for system, taken in samples.items()})


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=5).parse_args()
    report = Report("tower", args)
    qwen = tower_of("qwen2_5_vl", QWEN, rope_parameters=ROPE)
    for height, width in ((4, 8), (8, 8), (8, 16), (16, 16), (16, 32)):
        name = f"Qwen2.5-VL, {height * width} patches"
        report.add(measure(name, qwen, patches(height, width), args.rounds))
    llava = tower_of("llava", LLAVA, model_type="llama")
    image = {"pixel_values": pixels(1, 3, 336, 336)}
    report.add(measure("LLaVA, 336 pixels", llava, image, args.rounds))
    report.finish()


if __name__ == "__main__":
    main()
