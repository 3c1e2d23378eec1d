"""Random images beside random prompts: vLLM's dataset `random-mm`, of which images are supported.

A bucket is (height, width, frames) in pixels; frames above 1 are a video and need probability 0.
"""

import ast
import io
import json
import math
from dataclasses import dataclass, replace

import numpy as np

from headrace.bench.pages import Distinct
from headrace.bench.workload import BenchPrompt
from headrace.errors import ConfigError

BUCKETS = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5, (720, 1280, 16): 0.0}"  # vLLM's defaults
LIMITS = '{"image": 255, "video": 1}'
NUM_FILES = 4  # of each size; each image differs in its last bytes
QUALITY = 90


def noise_file(height: int, width: int, random: np.random.Generator) -> bytes:
    """Return an image of random pixels as a JPEG."""
    from PIL import Image

    pixels = random.integers(0, 256, (height, width, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


def read_buckets(text: str) -> dict[tuple[int, int], float]:
    """Read `--random-mm-bucket-config`: the share of images of each height and width.

    Raises:
        ConfigError: it is not a dictionary of buckets, or has videos.
    """
    flag = f"--random-mm-bucket-config {text}"
    try:
        read = ast.literal_eval(text)
        found = [
            (tuple(map(int, ast.literal_eval(key) if isinstance(key, str) else key)), float(share))
            for key, share in read.items()
        ]
        shares = {(height, width): share for (height, width, frames), share in found if frames == 1}
    except (ValueError, SyntaxError, TypeError, AttributeError):
        raise ConfigError(f"{flag}: must be like {{(HEIGHT, WIDTH, 1): SHARE}}") from None
    if any(share > 0 for (*_, frames), share in found if frames != 1):
        raise ConfigError(f"{flag}: (_, _, 1) is an image; videos and audio are not supported")
    if not all(share >= 0 and min(size) > 0 for size, share in shares.items()):
        raise ConfigError(f"{flag}: sizes must be above 0, and shares at least 0")
    total = sum(shares.values())
    if not 0 < total < math.inf:
        raise ConfigError(f"{flag}: the shares must have a sum above 0")
    return {size: share / total for size, share in shares.items() if share > 0}


def read_limit(text: str) -> int:
    """Read `--random-mm-limit-mm-per-prompt`: how many images a prompt has at most."""
    try:
        return int(json.loads(text)["image"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f'--random-mm-limit-mm-per-prompt {text}: must be like {{"image": 3}}'
        ) from None


@dataclass(frozen=True)
class RandomImages:
    """The number and sizes of images per prompt."""

    shares: dict[tuple[int, int], float]  # by height and width
    low: int
    high: int

    @classmethod
    def of(cls, buckets: str, limits: str, base: int, range_ratio: float) -> "RandomImages":
        """Read vLLM's flags.

        Raises:
            ConfigError: a flag has a value that cannot work.
        """
        if base < 0:
            raise ConfigError(f"--random-mm-base-items-per-request {base} must be at least 0")
        if not 0 <= range_ratio <= 1:
            raise ConfigError(
                f"--random-mm-num-mm-items-range-ratio {range_ratio} must be from 0 to 1"
            )
        low, high = math.floor(base * (1 - range_ratio)), math.ceil(base * (1 + range_ratio))
        limit = read_limit(limits)
        if low > limit:
            raise ConfigError(
                f"--random-mm-limit-mm-per-prompt allows {limit} images, and "
                f"--random-mm-base-items-per-request asks for at least {low}"
            )
        return cls(read_buckets(buckets), low, min(high, limit))

    def with_images(
        self, prompts: list[BenchPrompt], random: np.random.Generator
    ) -> list[BenchPrompt]:
        """Return prompts with images drawn for each; no two images are alike."""
        sizes = list(self.shares)
        images = [
            Distinct([noise_file(*size, random) for _ in range(NUM_FILES)], random)
            for size in sizes
        ]
        share = list(self.shares.values())
        made = []
        for prompt in prompts:
            count = int(random.integers(self.low, self.high + 1))
            drawn = random.choice(len(sizes), count, p=share)
            made.append(replace(prompt, images=tuple(images[i].url() for i in drawn)))
        return made
