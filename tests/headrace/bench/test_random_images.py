"""vLLM's `random-mm`: how many images, of which sizes."""

import argparse
import io
import json
from base64 import b64decode

import numpy as np
import pytest
from PIL import Image

from headrace.bench.endpoint import Endpoint
from headrace.bench.random_images import BUCKETS, LIMITS, RandomImages, read_buckets
from headrace.bench.serve import add_target, add_workload, check, requests_of
from headrace.bench.workload import BenchPrompt, TokenRates
from headrace.errors import ConfigError


def opened(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head == "data:image/jpeg;base64"
    image = Image.open(io.BytesIO(b64decode(data)))
    image.load()
    return image


def test_images_have_the_sizes_of_their_buckets() -> None:
    images = RandomImages.of("{(8, 24, 1): 3, (16, 16, 1): 1, (8, 8, 16): 0}", LIMITS, 2, 0.5)
    prompts = images.with_images([BenchPrompt("x", 1)] * 200, np.random.default_rng(0))
    urls = [url for prompt in prompts for url in prompt.images]
    assert {len(prompt.images) for prompt in prompts} == {1, 2, 3}
    assert len(set(urls)) == len(urls)
    sizes = [opened(url).size for url in urls]
    assert set(sizes) == {(24, 8), (16, 16)}
    assert 0.65 < sizes.count((24, 8)) / len(sizes) < 0.85


def test_limit_bounds_the_number_of_images() -> None:
    images = RandomImages.of("{(8, 8, 1): 1}", '{"image": 3, "video": 0}', 2, 1.0)
    assert (images.low, images.high) == (0, 3)
    with pytest.raises(ConfigError, match="allows 3 images"):
        RandomImages.of("{(8, 8, 1): 1}", '{"image": 3}', 4, 0.0)


def test_buckets_of_vllm_are_read() -> None:
    assert read_buckets(BUCKETS) == {(256, 256): 0.5, (720, 1280): 0.5}
    assert read_buckets('{"(32, 32, 1)": 2}') == {(32, 32): 1}


@pytest.mark.parametrize(
    ("buckets", "why"),
    [
        ("{(8, 8, 16): 1.0}", "videos and audio are not supported"),
        ("{(8, 8): 1.0}", "must be like"),
        ("[1]", "must be like"),
        ("__import__('os')", "must be like"),
        ("{(8, 0, 1): 1.0}", "above 0"),
        ("{(8, 8, 1): 0}", "a sum above 0"),
        ("{(8, 8, 1): -1, (8, 9, 1): 2}", "at least 0"),
    ],
)
def test_buckets_that_cannot_work_are_refused(buckets: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_buckets(buckets)


@pytest.mark.parametrize("limits", ["3", "{}", '{"image": "x"}', "{"])
def test_limits_that_cannot_work_are_refused(limits: str) -> None:
    with pytest.raises(ConfigError, match="must be like"):
        RandomImages.of(BUCKETS, limits, 1, 0.0)


class Counting(Endpoint):
    """An endpoint that is not there: a word is a token."""

    def rates(self, model: str, sample: str) -> TokenRates:
        return TokenRates()


def test_prompts_of_random_mm_carry_their_images() -> None:
    parser = argparse.ArgumentParser()
    add_target(parser)
    add_workload(parser)
    flags = "--dataset-name random-mm --num-prompts 3 --random-mm-base-items-per-request 2"
    args = parser.parse_args([*flags.split(), "--random-mm-bucket-config", "{(8, 8, 1): 1.0}"])
    check(args)
    requests = requests_of(args, Counting("http://none", "chat", "/v1/chat/completions", {}), "m")
    for request in requests:
        parts = json.loads(request.body)["messages"][0]["content"]
        assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    args.backend = "openai"
    with pytest.raises(ConfigError, match="need --backend openai-chat"):
        check(args)
