"""Models that take images say what `transformers.generate` says, in fp32, through the whole engine.

Sequences with one image, with several and with none share steps, in chunks, and decode during the
prompts of others. Pages and images are found again. Towers and workers are in this process.
"""

import sys
from array import array
from collections import abc, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import family_table
import numpy as np
import pytest
import torch
from engine_rig import WAIT_MS, Rig
from tiny_vision import (
    FAMILIES,
    GRIDS,
    IMAGE_TOKEN,
    SIZED,
    SPECIAL,
    TEXT,
    joined,
    make_vision_folder,
    picture,
    prepare,
)

from headrace.config.model_card import read_folder
from headrace.engine_proc.images.encoder_cache import EncoderCache
from headrace.engine_proc.images.encoder_queue import EncoderQueue, Losses
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.shm.embedding_area import EmbeddingArea
from headrace.engine_proc.step.step_builder import build_step
from headrace.engine_proc.vision.encoder import encode
from headrace.engine_proc.vision.tower import BY_IMAGE, Tensors, Tower, load
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.cpu_sampler import Sampler
from headrace.engine_proc.worker.execution.executor import Executor, Floats
from headrace.engine_proc.worker.execution.runner import GenerationRunner, batch_of
from headrace.engine_proc.worker.hf.executor import TransformersExecutor
from headrace.engine_proc.worker.hf.model import open_transformers
from headrace.engine_proc.worker.models.model import open_model
from headrace.ipc.arena import Arena
from headrace.ipc.messages import GenerateRequest, Image, Sampling, Tensor, request_id
from headrace.ipc.worker_messages import Encode, Step, StepResult, WorkerReady

PAGE_TOKENS = 16
NUM_PAGES = 64
NUM_ROWS = 256  # of embeddings
NUM_STATES = 24
MAX_MODEL_LEN = 320
NUM_NEW = 12
STEP_S = 0.01
MERGE = 2  # patches of a row of Qwen's, each way
# Families that differ from another one by little: `make families` has all of their tests.
RELATIVES = ("qwen3_vl_moe", "glm4v_moe", "gemma4_whole", "paligemma2")
# Images and prompts whole, in each kind of tower and of places; others in parts alone.
WHOLE = ("smolvlm", "llava_next", "qwen3_vl", "qwen3_5", "pixtral", "gemma3")
TILES = ("smolvlm", "idefics3")  # families that see all tiles of a prompt as those of one image
# Texts, and images by their seed and size.
PROMPTS: list[list[Any]] = [
    ["What is this? ", (1, 80, 60), "Say it in one word."],
    ["No image here, only words and words."],
    ["First ", (2, 40, 90), " then ", (3, 64, 64), (1, 80, 60), " compare."],
    ["Short."],
]


@dataclass
class Prompt:
    """Tokens, and images: what their processor makes of them, and where their rows are."""

    tokens: list[int] = field(default_factory=list)
    images: list[Tensors] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)


class Model:
    """A tiny checkpoint, opened twice: by transformers and by us."""

    def __init__(self, folder: Path, family: str) -> None:
        self.family = family
        self.folder = folder
        self.reference = make_vision_folder(folder, family)
        self.tower = Tower(load(folder))
        self.card = read_folder(folder)
        self.num_states = NUM_STATES if open_model(folder).spec.state_numbers else 0

    def executor(self) -> Executor:
        model = open_model(self.folder)
        sizes = {"num_pages": NUM_PAGES, "page_tokens": PAGE_TOKENS, "num_states": self.num_states}
        return CpuExecutor(model.spec, model.weights, **sizes, threads=2)

    def prompt(self, parts: list[Any]) -> Prompt:
        """Write a prompt as the processors do, markers included."""
        made = Prompt()
        for part in parts:
            if isinstance(part, str):
                made.tokens += part.encode()
                continue
            image = prepare(self.folder, picture(*part))
            num_rows = len(self.tower.encode([image])[0])
            made.images.append(image)
            made.places.append([])
            marker = IMAGE_TOKEN + 1 if len(SPECIAL[self.family]) > 1 else ord("\n")
            made.tokens.append(marker)
            for number in range(num_rows):
                if number and number % (num_rows // num_tiles(image)) == 0:
                    made.tokens.append(marker)  # between tiles
                made.places[-1].append(len(made.tokens))
                made.tokens.append(IMAGE_TOKEN)
            made.tokens.append(marker)
        return made

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        """Return a prompt as transformers takes it."""
        ids = torch.tensor([prompt.tokens])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        names = ("pixel_values", "pixel_attention_mask", "spatial_shapes", *BY_IMAGE)
        for name in names:
            parts = [image[name] for image in prompt.images if name in image]
            if parts and self.family in TILES:
                inputs[name] = torch.from_numpy(np.concatenate(parts, axis=1))
            elif parts:
                inputs[name] = torch.from_numpy(joined(parts))
        is_image = (ids == IMAGE_TOKEN).long()
        if self.family in GRIDS:
            inputs["mm_token_type_ids"] = is_image
        if self.family.startswith("gemma4"):
            inputs["mm_token_type_ids"] = is_image
        if self.family == "gemma3":
            inputs["token_type_ids"] = is_image
        if self.card.is_prefix_lm:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        return inputs

    @torch.inference_mode()
    def logits(self, prompt: Prompt) -> Floats:
        """Return what transformers says of every token of a prompt."""
        logits: Floats = self.reference(**self.inputs(prompt)).logits[0].numpy()
        return logits

    @torch.inference_mode()
    def expected(self, prompt: Prompt) -> list[int]:
        """Return what transformers generates."""
        inputs = self.inputs(prompt)
        output = self.reference.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
        generated: list[int] = output[0, len(prompt.tokens) :].tolist()
        return generated


def num_tiles(image: Tensors) -> int:
    """Return in how many parts the tower sees an image: `[1, tiles, 3, height, width]`."""
    pixels = image["pixel_values"]
    return pixels.shape[1] if pixels.ndim == 5 else 1


class Eyes:
    """A vision worker, in this process.

    Args:
        max_numbers: of images that are encoded together.
    """

    def __init__(self, tower: Tower, max_numbers: int) -> None:
        self._tower = tower
        self._max_numbers = max_numbers
        self.arena = Arena.create(1, 8 << 20)
        self._region = self.arena.region(0)
        self.area = EmbeddingArea.create(NUM_ROWS, tower.row_size)
        self._asked: Encode | None = None
        self.calls: list[int] = []  # images of each

    def encode(self, images: abc.Sequence[Tensors]) -> list[Floats]:
        self.calls.append(len(images))
        return self._tower.encode(images)

    def check(self) -> None: ...

    def show(self, image: Tensors) -> dict[str, Tensor]:
        """Put an image where it is looked for."""
        shown = {}
        for name, tensor in image.items():
            if num_tiles(image) > 1 and name != "image_sizes":
                tensor = tensor[0]  # as it travels
            place = self._region.allocate(tensor.nbytes)
            assert place is not None
            self._region.view(place)[: tensor.nbytes] = tensor.tobytes()
            self._region.send(place)
            generation = self._region.generation(place)
            shown[name] = Tensor(place, generation, tensor.dtype.str[1:], list(tensor.shape))
        return shown

    def ask(self, images: EncoderQueue, fingerprint: str = "") -> None:
        self._asked = images.next_batch(self._max_numbers) or self._asked

    def take(self, images: EncoderQueue) -> Losses:
        if self._asked is None:
            return Losses()
        message, self._asked = self._asked, None
        return images.take(encode(message, self, self.arena, self.area.rows))


class Worker:
    """A worker, in this process."""

    def __init__(self, runner: GenerationRunner) -> None:
        self._runner = runner
        self._steps: list[Step] = []
        self.sizes: list[int] = []  # tokens of each step

    def are_ready(self) -> bool:
        return True

    def check(self) -> None: ...

    def start(self, step: Step) -> None:
        self._steps.append(step)
        self.sizes.append(len(step.token_ids) // 4)

    def finish(self, patience_s: float | None = None) -> StepResult:
        return self._runner.run(self._steps.pop(0))


class Served:
    """A model in an engine."""

    def __init__(
        self,
        model: Model,
        executor: Executor,
        run_dir: Path,
        chunk: int,
        max_numbers: int = 0,
        speculative: str = "off",
        num_pages: int = NUM_PAGES,
    ) -> None:
        self.eyes = Eyes(model.tower, max_numbers)
        sampler = Sampler(model.reference.config.text_config.vocab_size, threads=1)
        self.worker = Worker(GenerationRunner(executor, sampler, self.eyes.area.rows))
        self.pool = EncoderCache(NUM_ROWS)
        release = self.eyes.arena.release
        images = EncoderQueue(self.pool, IMAGE_TOKEN, release, model.card.whole_images)
        self.rig = Rig(
            run_dir,
            ready=WorkerReady(num_pages, PAGE_TOKENS, num_states=model.num_states),
            images=images,
            sight=self.eyes,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=len(PROMPTS),
            max_num_batched_tokens=chunk,
            is_prefix_lm=model.card.is_prefix_lm,
            speculative=speculative,
        )
        self._counter = 0

    def request(self, prompt: Prompt) -> GenerateRequest:
        """Return what a process that prepares images would send."""
        self._counter += 1
        images = []
        for image, places in zip(prompt.images, prompt.places, strict=True):
            pixels = image["pixel_values"].tobytes()
            start, num_tokens = places[0], places[-1] + 1 - places[0]
            grid: list[int] = []
            if "image_grid_thw" in image:
                frames, height, width = image["image_grid_thw"][0].tolist()
                grid = [frames, height // MERGE, width // MERGE]
            key, shown = blake2b(pixels, digest_size=16).digest(), self.eyes.show(image)
            images.append(Image(key, start, num_tokens, len(places), shown, grid))
        id, stops = request_id(0, self._counter), [TEXT["eos_token_id"]]
        return GenerateRequest(id, 0, NUM_NEW, Sampling(), stops, b"plan", images=images)

    def generate(self, prompts: list[Prompt]) -> list[list[int]]:
        """Return the answers to prompts that come together."""
        requests = [self.request(prompt) for prompt in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            self.rig.take(request, prompt=tuple(prompt.tokens))
        said, ended = defaultdict[int, list[int]](list), set[int]()
        while len(ended) < len(requests):
            self.rig.engine.poll_images()
            self.rig.engine.run_once(self.worker)  # type: ignore[arg-type]
            self.rig.now += STEP_S
            self.rig.links.flush()
            is_busy = self.rig.scheduler.has_work or self.rig.images.num_waiting > 0
            received = self.rig.detokenizers[0].receive(0 if is_busy else WAIT_MS)
            assert is_busy or received is not None, f"{len(requests) - len(ended)} have not ended"
            if received is not None:
                output, tokens = received[0], iter(array("I", bytes(received[1])))
                for id, count, finish in output.rows():
                    said[id] += [next(tokens) for _ in range(count)]
                    ended |= {id} if finish is not None else set()
        return [said[request.id] for request in requests]

    def close(self) -> None:
        self.rig.close()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[Prompt]:
    return [model.prompt(parts) for parts in PROMPTS]


@pytest.fixture(scope="module")
def expected(model: Model, prompts: list[Prompt]) -> list[list[int]]:
    """What transformers generates."""
    if model.family in RELATIVES and not family_table.WRITES:
        pytest.skip("logits alone are compared; `make families` has the rest")
    return [model.expected(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("chunk", "max_numbers", "calls"), [(7, 1 << 20, [3]), (1000, 0, [1, 1, 1])]
)
def test_greedy_tokens_are_those_of_transformers(
    chunk: int,
    max_numbers: int,
    calls: list[int],
    model: Model,
    prompts: list[Prompt],
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    if chunk > MAX_MODEL_LEN and model.family not in WHOLE and not family_table.WRITES:
        pytest.skip("prompts go in parts; `make families` has them whole")
    chunk = max(chunk, model.card.image_run)
    if model.card.is_prefix_lm:
        chunk = max(chunk, MAX_MODEL_LEN + len(PROMPTS))
    calls = [1, 1, 1] if model.family in SIZED else calls
    served = Served(model, model.executor(), tmp_path, chunk, max_numbers)
    assert served.generate(prompts) == expected
    assert served.eyes.calls == calls  # of images of two requests
    num_steps = len(served.worker.sizes)
    assert max(served.worker.sizes) <= chunk
    assert served.generate(prompts) == expected  # with what is found again
    assert served.eyes.calls == calls
    least = 1 if model.num_states else 2  # a state is found where it was kept, not in each page
    if not model.card.is_prefix_lm:  # of which no prefix is found again
        assert sum(served.worker.sizes[:num_steps]) > least * sum(served.worker.sizes[num_steps:])
    assert served.pool.num_free == NUM_ROWS
    served.close()


def test_logits_are_those_of_transformers(
    model: Model, prompts: list[Prompt], tmp_path: Path
) -> None:
    executor = model.executor()
    served = Served(model, executor, tmp_path, 1000)
    for prompt in prompts:
        bulk = array("I", prompt.tokens).tobytes()
        sequence = Sequence.of(served.request(prompt), bulk)
        sequence.pages = array("i", range(NUM_PAGES))
        sequence.num_prefix = len(prompt.tokens) if model.card.is_prefix_lm else 0
        served.rig.images.enter(sequence)
        while served.rig.images.num_waiting:
            served.rig.engine.poll_images()
        step = build_step([Chunk.of(sequence, 0, len(prompt.tokens))])
        rows = np.arange(len(prompt.tokens), dtype=np.int32)
        batch = batch_of(step, rows.tobytes(), served.eyes.area.rows)
        slots = {"state_in": np.array([-1], np.int32), "state_out": np.array([0], np.int32)}
        batch = replace(batch, **slots) if model.num_states else batch
        logits = executor.forward(batch)
        expected = model.logits(prompt)
        assert np.abs(expected).max() > 0.3
        np.testing.assert_allclose(logits, expected, atol=5e-5)
    served.close()


def test_what_runs_in_transformers_says_the_same(tmp_path: Path) -> None:
    model = Model(tmp_path, "gemma3")
    opened = open_transformers(tmp_path, dtype="float32", max_model_len=MAX_MODEL_LEN)
    executor = TransformersExecutor(opened, num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS)
    prompts = [model.prompt(parts) for parts in PROMPTS]
    served = Served(model, executor, tmp_path, 7)
    assert served.generate(prompts) == [model.expected(prompt) for prompt in prompts]
    served.close()


@pytest.mark.parametrize("family", ["gemma3", "paligemma"])
def test_kernels_of_gpus_say_what_transformers_says(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image's tokens see each other, or all tokens of a prompt do; then they are decoded."""
    pytest.importorskip("triton", reason="triton is not installed")
    from mutants.quick_interpreter import quick_interpreter
    from on_kernels import IS_INTERPRETED, OnKernels

    monkeypatch.setattr(sys.modules[__name__], "NUM_NEW", 3)  # kernels are interpreted
    model = Model(tmp_path, family)
    prompts = [model.prompt(PROMPTS[0]), model.prompt(PROMPTS[3])]
    chunk = MAX_MODEL_LEN + len(PROMPTS) if model.card.is_prefix_lm else model.card.image_run + 7
    made, sizes = open_model(tmp_path), {"num_pages": NUM_PAGES, "page_tokens": PAGE_TOKENS}
    with quick_interpreter() if IS_INTERPRETED else nullcontext():
        executor = OnKernels(made.spec, made.weights, **sizes, max_model_len=MAX_MODEL_LEN)
        served = Served(model, executor, tmp_path, chunk)
        assert served.generate(prompts) == [model.expected(prompt) for prompt in prompts]
    served.close()


def test_drafts_change_no_text_behind_images(tmp_path: Path) -> None:
    """Positions behind an image are none of its tokens'. What an answer was is drafted again."""
    model = Model(tmp_path, "qwen2_5_vl")
    prompts = [model.prompt(parts) for parts in PROMPTS]
    expected = [model.expected(prompt) for prompt in prompts]
    served = Served(model, model.executor(), tmp_path, 1000, speculative="ngram")
    assert served.generate(prompts) == expected
    assert served.generate(prompts) == expected
    assert served.rig.scheduler.counts.accepted_drafts > 0
    served.close()


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_a_prefix_lm_s_text_lasts_over_preemptions(speculative: str, tmp_path: Path) -> None:
    """A prompt is computed again with what was generated, all of it in one step."""
    model = Model(tmp_path, "paligemma")
    prompts = [model.prompt([*PROMPTS[2], f" {number}"]) for number in range(len(PROMPTS))]
    num_pages = sum(-(-len(prompt.tokens) // PAGE_TOKENS) for prompt in prompts)
    chunk = MAX_MODEL_LEN + len(PROMPTS)
    served = Served(
        model, model.executor(), tmp_path, chunk, speculative=speculative, num_pages=num_pages
    )
    assert served.generate(prompts) == [model.expected(prompt) for prompt in prompts]
    assert served.rig.scheduler.counts.preemptions > 0
    served.close()


def test_another_image_makes_another_text(model: Model, tmp_path: Path) -> None:
    served = Served(model, model.executor(), tmp_path, 1000)
    parts = ["What is this? ", "Say it in one word."]
    prompts = [model.prompt([parts[0], (seed, 80, 60), parts[1]]) for seed in (1, 2)]
    first, second = served.generate(prompts)
    assert first != second
    served.close()
