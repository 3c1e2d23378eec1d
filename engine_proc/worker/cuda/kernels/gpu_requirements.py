"""The GPUs that torch finds."""

from functools import cache

import torch

MIN_CAPABILITY = (8, 0)  # of Triton's bf16 products
FP8_CAPABILITY = (8, 9)  # of Ada
TMA_CAPABILITY = (9, 0)  # of Hopper
# Of graphics cards: Ampere's, Ada's, Blackwell's.
SMALL_CAPABILITIES = ((8, 6), (8, 9), (12, 0), (12, 1))


def find(num: int) -> str:
    """Return why there are not `num` usable GPUs; "" if there are."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU; it is built for CUDA {torch.version.cuda}"
    found = torch.cuda.device_count()
    if found < num:
        return f"--tp {num} takes {num} GPUs, and there are {found}"
    for index in range(num):
        if torch.cuda.get_device_capability(index) < MIN_CAPABILITY:
            return f"{torch.cuda.get_device_name(index)} is older than Ampere"
    return ""


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU has 8-bit floats; the interpreter of kernels has."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


@cache  # each launch asks
def has_tma(device: torch.device) -> bool:
    """Whether a GPU has a tensor memory accelerator; the interpreter of kernels has."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= TMA_CAPABILITY


def is_hopper(device: torch.device) -> bool:
    """Whether a GPU is a Hopper: H100, H200."""
    major = TMA_CAPABILITY[0]
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == major


def has_small_memory(device: torch.device) -> bool:
    """Whether a program has 99 KiB of a GPU's shared memory at most, and not 163 or more."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in SMALL_CAPABILITIES
