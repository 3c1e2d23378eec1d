"""Models that take images say what `transformers.generate` says, in fp32.

Sequences with one image, with several and with none share batches, in chunks, and decode while
others are still being read.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vision import (
    FAMILIES,
    IMAGE_TOKEN,
    TEXT,
    make_vision_folder,
    picture,
    prepare,
)

from headrace.engine_proc.rope_positions import Grid, RopePositions
from headrace.engine_proc.vision.tower import Tensors, Tower
from headrace.engine_proc.worker.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.executor import Batch, Executor, Floats
from headrace.engine_proc.worker.model import open_model
from headrace.engine_proc.worker.transformers_executor import TransformersExecutor
from headrace.engine_proc.worker.transformers_model import open_transformers
from headrace.model_card import read_folder

PAGE_TOKENS = 16
PAGES_EACH = 16  # of a sequence
NUM_NEW = 12
MERGE = 2  # patches of a row of Qwen's, each way
# Texts, and images by their seed and size.
PROMPTS: list[list[Any]] = [
    ["What is this? ", (1, 80, 60), "Say it in one word."],
    ["No image here, only words and words."],
    ["First ", (2, 40, 90), " then ", (3, 64, 64), (1, 80, 60), " compare."],
    ["Short."],
]


@dataclass
class Sequence:
    """A prompt, and what has been made of it."""

    tokens: list[int] = field(default_factory=list)
    images: list[Tensors] = field(default_factory=list)
    grids: list[tuple[int, Grid]] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)  # of the embedding area, by position
    num_prompt: int = 0
    num_computed: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def is_done(self) -> bool:
        return self.generated[-1:] == [TEXT["eos_token_id"]] or len(self.generated) == NUM_NEW


class Model:
    """A tiny checkpoint, opened twice: by transformers and by us."""

    def __init__(self, folder: Path, family: str) -> None:
        self.family = family
        self.folder = folder
        self.reference = make_vision_folder(folder, family)
        self.tower = Tower(folder)
        self.card = read_folder(folder)
        self.embeds = np.empty((0, self.card.image_row_size), np.float32)

    def executor(self) -> CpuExecutor:
        model = open_model(self.folder)
        num_pages = PAGES_EACH * len(PROMPTS)
        return CpuExecutor(
            model.spec, model.weights, num_pages=num_pages, page_tokens=PAGE_TOKENS, threads=2
        )

    def prompt(self, parts: list[Any]) -> Sequence:
        """Write a prompt as the processors do, markers included; and encode its images."""
        made = Sequence()
        for part in parts:
            if isinstance(part, str):
                made.tokens += part.encode()
                continue
            image = prepare(self.folder, picture(*part))
            made.images.append(image)
            rows = self.tower.encode(image)
            marker = IMAGE_TOKEN + 1 if self.family != "llava" else ord("\n")
            made.tokens.append(marker)
            if "image_grid_thw" in image:
                t, h, w = image["image_grid_thw"][0].tolist()
                made.grids.append((len(made.tokens), (t, h // MERGE, w // MERGE)))
            for number in range(len(rows)):
                if number and number % (len(rows) // num_tiles(image)) == 0:
                    made.tokens.append(marker)  # between tiles
                made.rows[len(made.tokens)] = len(self.embeds) + number
                made.tokens.append(IMAGE_TOKEN)
            made.tokens.append(marker)
            self.embeds = np.concatenate([self.embeds, rows])
        made.num_prompt = len(made.tokens)
        return made

    def inputs(self, sequence: Sequence) -> dict[str, Any]:
        """Return a prompt as transformers takes it."""
        ids = torch.tensor([sequence.tokens[: sequence.num_prompt]])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
        for name in names:
            parts = [torch.from_numpy(image[name]) for image in sequence.images if name in image]
            if parts:
                inputs[name] = torch.cat(parts, dim=int(num_tiles(sequence.images[0]) > 1))
        is_image = (ids == IMAGE_TOKEN).long()
        if self.family == "qwen2_5_vl":
            inputs["mm_token_type_ids"] = is_image
        if self.family == "gemma3":
            inputs["token_type_ids"] = is_image
        return inputs

    @torch.inference_mode()
    def logits(self, sequence: Sequence) -> Floats:
        """Return what transformers says of every token of a prompt."""
        logits: Floats = self.reference(**self.inputs(sequence)).logits[0].numpy()
        return logits

    @torch.inference_mode()
    def expected(self, sequence: Sequence) -> list[int]:
        """Return what transformers generates."""
        inputs = self.inputs(sequence)
        output = self.reference.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
        generated: list[int] = output[0, sequence.num_prompt :].tolist()
        return generated


def num_tiles(image: Tensors) -> int:
    """Return in how many parts the tower sees an image: `[1, tiles, 3, height, width]`."""
    pixels = image["pixel_values"]
    return pixels.shape[1] if pixels.ndim == 5 else 1


def step_of(model: Model, sequences: list[Sequence], numbers: list[int], chunk: int) -> Batch:
    """Return the next tokens of each sequence; where images must be whole, up to their end."""
    starts, stops = [], []
    for sequence in sequences:
        stop = min(sequence.num_computed + chunk, len(sequence.tokens))
        while model.card.whole_images and {stop - 1, stop} <= sequence.rows.keys():
            stop += 1
        starts.append(sequence.num_computed)
        stops.append(stop)
    spans = list(zip(sequences, starts, stops, strict=True))
    places = [(s, position) for s, start, stop in spans for position in range(start, stop)]
    ends = np.cumsum([stop - start for _, start, stop in spans])
    pages = np.random.default_rng(0).permutation(PAGES_EACH * len(PROMPTS))
    table = pages.reshape(len(PROMPTS), PAGES_EACH)[numbers]
    has_images = any(s.rows for s in sequences)
    triples = [RopePositions(s.grids).of(start, stop - start) for s, start, stop in spans]
    return Batch(
        token_ids=np.array([s.tokens[position] for s, position in places], np.int32),
        positions=np.array([position for _, position in places], np.int32),
        sequences=np.repeat(np.arange(len(spans)), np.diff(ends, prepend=0)).astype(np.int32),
        page_table=table.astype(np.int32),
        logit_rows=(ends - 1).astype(np.int32),
        embed_rows=np.array([s.rows.get(position, -1) for s, position in places], np.int32)
        if has_images
        else None,
        embeds=model.embeds,
        rope_positions=np.concatenate(triples).astype(np.int32).reshape(-1, 3)
        if any(s.grids for s in sequences)
        else None,
        last_seen=np.array([last_seen(s, position) for s, position in places], np.int32)
        if has_images and model.card.whole_images
        else None,
    )


def last_seen(sequence: Sequence, position: int) -> int:
    """Return the last position a token sees: the end of its image."""
    while {position, position + 1} <= sequence.rows.keys():
        position += 1
    return position


def generate(model: Model, executor: Executor, sequences: list[Sequence], chunk: int) -> None:
    """Run all sequences to their end, side by side."""
    while running := [i for i, s in enumerate(sequences) if not s.is_done]:
        step = step_of(model, [sequences[i] for i in running], running, chunk)
        logits: Floats = executor.forward(step)
        counts = np.bincount(step.sequences)
        for i, count, row in zip(running, counts, logits, strict=True):
            sequence = sequences[i]
            sequence.num_computed += int(count)
            if sequence.num_computed == len(sequence.tokens):
                sequence.tokens.append(int(row.argmax()))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_greedy_tokens_are_those_of_transformers(chunk: int, model: Model) -> None:
    sequences = [model.prompt(parts) for parts in PROMPTS]
    expected = [model.expected(sequence) for sequence in sequences]
    generate(model, model.executor(), sequences, chunk)
    assert [sequence.generated for sequence in sequences] == expected


def test_logits_are_those_of_transformers(model: Model) -> None:
    for number, parts in enumerate(PROMPTS):
        sequence = model.prompt(parts)
        step = step_of(model, [sequence], [number], chunk=1000)
        rows = np.arange(sequence.num_prompt, dtype=np.int32)
        logits = model.executor().forward(dataclasses.replace(step, logit_rows=rows))
        expected = model.logits(sequence)
        assert np.abs(expected).max() > 0.3
        np.testing.assert_allclose(logits, expected, atol=5e-5)


def test_what_runs_in_transformers_says_the_same(tmp_path: Path) -> None:
    model = Model(tmp_path, "gemma3")
    opened = open_transformers(tmp_path, dtype="float32", max_model_len=200)
    num_pages = PAGES_EACH * len(PROMPTS)
    executor = TransformersExecutor(opened, num_pages=num_pages, page_tokens=PAGE_TOKENS)
    sequences = [model.prompt(parts) for parts in PROMPTS]
    expected = [model.expected(sequence) for sequence in sequences]
    generate(model, executor, sequences, chunk=7)
    assert [sequence.generated for sequence in sequences] == expected


def test_another_image_makes_another_text(model: Model) -> None:
    texts = []
    for seed in (1, 2):
        sequence = model.prompt(["What is this? ", (seed, 80, 60), "Say it in one word."])
        generate(model, model.executor(), [sequence], chunk=1000)
        texts.append(sequence.generated)
    assert texts[0] != texts[1]
