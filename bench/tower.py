"""Measure the gain of encoding images in one call of a vision tower, on a CPU.

Method: towers of published sizes with random weights, a quarter of their layers, which are all
        alike. The same images go through one by one and then 2 and 4 in a call, in turns.
        SigLIP goes through the C++ core and torch in turns, an image in a call, in fp32. Where
        weights are stored in bf16, the core rounds to bf16 what meets them, unless it is to be
        exact.
Run:    python bench/tower.py --rounds 5
        python bench/tower.py --rounds 3 --only siglip --save amx --add
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from headrace.engine_proc.vision.encoder import ImageEncoder, Tensors
from headrace.engine_proc.vision.siglip_tower import SiglipTower, spec_of
from headrace.engine_proc.vision.tower import Tower
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor
from support.report import Quantity, Report, parser

COUNTS = (1, 2, 4)
CORE, TORCH = "core", "torch"
# With a quarter of the layers.
SMOLVLM = {
    "model_type": "smolvlm_vision",
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 3},
    **{"num_attention_heads": 12, "image_size": 512, "patch_size": 16},
}
GEMMA3 = {
    "model_type": "siglip_vision_model",
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 7},
    **{"num_attention_heads": 16, "image_size": 896, "patch_size": 14},
    "vision_use_head": False,
}
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


def core_tower(tower: Tower, rounds_activations: bool) -> SiglipTower:
    """Return a tower in the core with the weights of another, in bf16 where it rounds."""
    module = tower.module
    kind, format = torch.float32, Format.F32
    if rounds_activations:
        kind, format = torch.bfloat16, Format.BF16
    weights = {
        name: StoredTensor(
            format, tuple(own.shape), own.to(kind).contiguous().flatten().view(torch.uint8).numpy()
        )
        for name, own in module.state_dict().items()
        if not name.startswith(("text_model.", "language_model."))
    }
    config = module.config.to_dict()
    return SiglipTower(config, spec_of(config), weights, is_exact=not rounds_activations)


def measure_core(name: str, tower: Tower, image: Tensors, rounds: int) -> Iterator[Quantity]:
    """Yield milliseconds of an image in the core and in torch; the first round is thrown away."""
    for rounding, stored in ((False, "fp32"), (True, "bf16 weights")):
        towers: dict[str, ImageEncoder] = {CORE: core_tower(tower, rounding), TORCH: tower}
        samples: dict[str, list[float]] = {system: [] for system in towers}
        for _ in range(rounds + 1):
            for system, one in towers.items():
                start = time.perf_counter()
                one.encode([image])
                samples[system].append((time.perf_counter() - start) * 1e3)
        yield Quantity(f"{name}, {stored}", "ms", {s: taken[1:] for s, taken in samples.items()})


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--only", choices=("siglip",), help="measure this alone")
    args = options.parse_args()
    report = Report("tower", args)
    smolvlm = tower_of("smolvlm", SMOLVLM, model_type="llama")
    for row in measure_core(
        "SmolVLM, a tile of 512 pixels",
        smolvlm,
        {"pixel_values": pixels(1, 3, 512, 512)},
        args.rounds,
    ):
        report.add(row)
    gemma3 = tower_of("gemma3", GEMMA3, model_type="gemma3_text")
    image = {"pixel_values": pixels(1, 3, 896, 896)}
    for row in measure_core("Gemma 3, 896 pixels", gemma3, image, args.rounds):
        report.add(row)
    if args.only is None:
        measure_batches(report, args.rounds)
    report.finish()


def measure_batches(report: Report, rounds: int) -> None:
    """Add what images gain by going together."""
    qwen = tower_of("qwen2_5_vl", QWEN, rope_parameters=ROPE)
    for height, width in ((4, 8), (8, 8), (8, 16), (16, 16), (16, 32)):
        name = f"Qwen2.5-VL, {height * width} patches"
        report.add(measure(name, qwen, patches(height, width), rounds))
    llava = tower_of("llava", LLAVA, model_type="llama")
    image = {"pixel_values": pixels(1, 3, 336, 336)}
    report.add(measure("LLaVA, 336 pixels", llava, image, rounds))


if __name__ == "__main__":
    main()
