"""Every family with latent attention, lowered, generates the text of transformers, whatever its
sequences go through: batch mates, chunks, cached prefixes, preemptions, retries and deaths."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hybrid_models import NUM_TOKENS, PROMPTS, Generation
from latent_models import LATENT, tiny_latent
from reference import endless_answers

from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Executor
from headrace.engine_proc.worker.models import latent_families
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor

Make = Callable[..., Executor]
Answers = list[list[int]]


@pytest.fixture(scope="module", params=LATENT)
def latent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A case's folder, and what transformers answers."""
    folder = tmp_path_factory.mktemp("latent")
    model = tiny_latent(request.param)
    model.save_pretrained(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPTS[2]])).logits[0].numpy()
    assert np.abs(logits).max() > 1, "a model that says nothing agrees with anything"
    return folder, logits, endless_answers(model, PROMPTS, NUM_TOKENS)


@pytest.fixture
def make(latent: Any) -> Make:
    """Makes executors in the core."""
    model = open_model(latent[0])
    return partial(CpuExecutor, model.spec, model.weights, threads=2)


@pytest.fixture
def expected(latent: Any) -> Answers:
    answers: Answers = latent[2]
    return answers


@pytest.mark.parametrize("executor", [TorchExecutor, CpuExecutor])
def test_logits_of_latents_are_those_of_transformers(latent: Any, executor: Any) -> None:
    folder, expected, _ = latent
    model = open_model(folder)
    count = len(PROMPTS[2])
    step = Batch(
        token_ids=np.array(PROMPTS[2], np.int32),
        positions=np.arange(count, dtype=np.int32),
        sequences=np.zeros(count, np.int32),
        page_table=np.array([[5, 0, 3, 2]], np.int32),
        logit_rows=np.arange(count, dtype=np.int32),
    )
    run = executor(model.spec, model.weights, num_pages=6, page_tokens=16)
    np.testing.assert_allclose(run.forward(step), expected, atol=3e-5, rtol=0)


def test_latents_answer_as_transformers_alone(make: Make, expected: Answers) -> None:
    generation = Generation(make)
    assert [generation.answers([prompt])[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("budget", [4, 7, 16, 19, 64])
@pytest.mark.parametrize("depth", [1, 2])
def test_latents_answer_together_in_chunks(
    make: Make, expected: Answers, budget: int, depth: int
) -> None:
    generation = Generation(make, budget=budget, depth=depth)
    assert generation.answers(PROMPTS) == expected
    assert (generation.scheduler.counts.steps_ahead > 0) == (depth == 2)


def test_latents_answer_after_a_cached_prompt(make: Make, expected: Answers) -> None:
    generation = Generation(make)
    for _ in range(2):
        assert generation.answers(PROMPTS) == expected
    assert generation.scheduler.counts.prefix_hits == 16 + 48


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_latents_answer_the_same(make: Make, expected: Answers, depth: int) -> None:
    generation = Generation(make, num_pages=7, depth=depth)
    assert generation.answers(PROMPTS) == expected
    assert generation.scheduler.counts.preemptions > 0


@pytest.mark.parametrize("what", ["die", "fail"])
def test_latents_answer_after_lost_steps(make: Make, expected: Answers, what: str) -> None:
    generation = Generation(make, budget=24)
    sequences = [generation.add(prompt) for prompt in PROMPTS]
    for _ in range(3):
        for _ in range(6):
            generation.step()
        getattr(generation, what)()
    generation.run()
    assert [list(sequence.generated) for sequence in sequences] == expected


def test_every_family_of_latents_has_a_case() -> None:
    assert {case.split()[0] for case in LATENT} == set(latent_families.LATENT)
