"""Whatever bytes come, nothing dies of them: a short run, the same each time."""

import os
import random
import zlib

import pytest
from fuzz_targets import TARGETS
from mutations import mutated

# Of each target, so that it takes some tenths of a second; `make test-fast` does a tenth.
TRIES = {
    "decoders": 6000,
    "step_output": 2000,
    "columns": 5000,
    "step": 3000,
    "gguf": 1000,
    "gguf_values": 1000,
    "gguf_split": 400,
    "mmproj_values": 1000,
    "safetensors": 2000,
    "template": 150,
    "image": 2000,
    "parsers": 1500,
}


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_is_borne(name: str) -> None:
    target = TARGETS[name]
    rng = random.Random(zlib.crc32(name.encode()))
    seeds = target.seeds()
    corpus = [*seeds]
    for seed in seeds:
        target.run(seed)
    for _ in range(TRIES[name] // (10 if "FAST" in os.environ else 1)):
        data = mutated(rng.choice(corpus), seeds, rng)
        if rng.random() < 0.2:  # others begin there
            corpus.append(data)
        try:
            target.run(data)
        except BaseException as error:
            error.add_note(f"{name} was given {data!r}")
            raise
