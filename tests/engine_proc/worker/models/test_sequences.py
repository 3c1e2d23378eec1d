"""What sequences may go through changes no text, whatever mixes tokens in a layer: batch mates,
chunks, cached prefixes, preemptions, drafts, retries and deaths. test_family_table.py has all
families, each in one way of a kind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from decoder_cases import DecoderCase, decoder_case, part_of_prompt
from gemma_models import GEMMAS
from generation import NUM_PAGES, NUM_TOKENS, PROMPTS, Generation, HalfRightProposer
from hybrid_models import HYBRIDS
from latent_models import LATENT

from headrace.engine_proc.scheduling.speculation import Speculation
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Executor
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor

Make = Callable[..., Executor]
Answers = list[list[int]]
STATES = (  # one of each mixer with a state
    "lfm2",  # short convolutions
    "qwen3_next",  # gated delta nets, and experts
    "kimi_linear",  # those of Kimi, beside latents
    "bamba",  # Mamba-2
    "falcon_h1",  # beside attention
    "nemotron_h with experts and biases",  # and layers that are halves
)
OTHERS = ("deepseek_v3", "gemma3n_text", "gemma4_text with wide MLPs")  # latents; shared keys


@pytest.mark.parametrize("case", [*HYBRIDS, *LATENT, *GEMMAS])
@pytest.mark.parametrize("executor", [TorchExecutor, CpuExecutor])
def test_logits_are_those_of_transformers(case: str, executor: Any) -> None:
    made = decoder_case(case)
    run = executor(made.ours.spec, made.ours.weights, num_pages=6, page_tokens=16, num_states=2)
    found = run.forward(part_of_prompt(0, len(PROMPTS[2])))
    np.testing.assert_allclose(found, made.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("executor", [TorchExecutor, CpuExecutor])
@pytest.mark.parametrize("covered", [1, 3, 20])
def test_drafts_change_no_state(case: str, executor: Any, covered: int) -> None:
    """Tokens behind the end of a written state give logits, and leave no trace in it."""
    made = decoder_case(case)
    expected = made.logits
    run = executor(made.ours.spec, made.ours.weights, num_pages=6, page_tokens=16, num_states=2)
    first = part_of_prompt(0, covered + 4, state_ends=np.array([covered], np.int32))
    np.testing.assert_allclose(run.forward(first), expected[: covered + 4], atol=1e-4, rtol=0)
    rest = part_of_prompt(covered, len(PROMPTS[2]))
    np.testing.assert_allclose(run.forward(rest), expected[covered:], atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=[*STATES, *OTHERS])
def made(request: pytest.FixtureRequest) -> DecoderCase:
    return decoder_case(request.param)


@pytest.fixture
def make(made: DecoderCase) -> Make:
    """Makes executors in the core."""
    return partial(made.make, threads=2)


@pytest.fixture
def expected(made: DecoderCase) -> Answers:
    return made.answers


def test_sequences_answer_as_transformers_alone(make: Make, expected: Answers) -> None:
    generation = Generation(make)
    assert [generation.answers([prompt])[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("budget", [4, 16, 19])
@pytest.mark.parametrize("depth", [1, 2])
def test_sequences_answer_together_in_chunks(
    make: Make, expected: Answers, budget: int, depth: int
) -> None:
    generation = Generation(make, budget=budget, depth=depth)
    assert generation.answers(PROMPTS) == expected
    assert (generation.scheduler.counts.steps_ahead > 0) == (depth == 2)


def test_sequences_without_prefix_cache_answer_the_same(make: Make, expected: Answers) -> None:
    assert Generation(make, reuses_prefixes=False).answers(PROMPTS) == expected


def test_sequences_answer_after_a_cached_prompt(make: Make, expected: Answers) -> None:
    """The second time, all but the last page of each prompt is known."""
    generation = Generation(make)
    assert generation.answers(PROMPTS) == expected
    assert generation.scheduler.counts.prefix_hits == 0
    assert generation.answers(PROMPTS) == expected
    assert generation.scheduler.counts.prefix_hits == 0 + 16 + 48


def test_next_turn_goes_on_where_one_ended(make: Make, expected: Answers) -> None:
    generation = Generation(make)
    generation.answers(PROMPTS)
    turn = generation.add([*PROMPTS[2], *expected[2], 5, 6, 7])
    generation.run()
    assert turn.num_cached == (53 + 24 - 1) // 16 * 16
    fresh = Generation(make, reuses_prefixes=False)
    assert [list(turn.generated)] == fresh.answers([list(turn.tokens[: turn.num_prompt])])


def test_a_shared_beginning_of_sequences_gets_a_checkpoint(make: Make) -> None:
    """The first prompt leaves none there, the second one does, and the third goes on from it."""
    generation = Generation(make)
    turns = []
    for own in ([1] * 20, [2] * 20, [3] * 20):
        turns.append(generation.add([*PROMPTS[1], *own], 4))
        generation.run()
    assert [turn.num_cached for turn in turns] == [0, 0, 32]
    fresh = Generation(make, reuses_prefixes=False)
    assert fresh.answers([[*PROMPTS[1], *[3] * 20]])[0][:4] == list(turns[2].generated)


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_answer_the_same(make: Make, expected: Answers, depth: int) -> None:
    generation = Generation(make, num_pages=7, depth=depth)
    assert generation.answers(PROMPTS) == expected
    assert generation.scheduler.counts.preemptions > 0


def test_preempted_sequence_resumes_at_its_checkpoint(make: Make, expected: Answers) -> None:
    generation = Generation(make)
    sequence = generation.add(PROMPTS[2])
    while len(sequence.tokens) < 70:
        generation.step()
    generation.scheduler._preempt(sequence)
    (chunk,) = generation.scheduler.schedule()
    assert chunk.start == 64, "behind the last page that it had filled"
    generation.scheduler.retry()
    generation.run()
    assert list(sequence.generated) == expected[2]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("what", ["die", "fail"])
def test_sequences_answer_after_lost_steps(
    make: Make, expected: Answers, what: str, depth: int
) -> None:
    generation = Generation(make, budget=24, depth=depth)
    sequences = [generation.add(prompt) for prompt in PROMPTS]
    for _ in range(3):
        for _ in range(6):
            generation.step()
        getattr(generation, what)()
    assert generation.scheduler.has_work
    generation.run()
    assert [list(sequence.generated) for sequence in sequences] == expected


def test_sequences_answer_with_few_slots(make: Make, expected: Answers) -> None:
    """Two for each of two sequences that run: checkpoints come and go."""
    generation = Generation(make, num_states=4)
    for _ in range(2):
        assert generation.answers(PROMPTS) == expected


@pytest.mark.parametrize(
    "options", [{}, {"budget": 7}, {"num_pages": 7}, {"num_states": 4}, {"reuses_prefixes": False}]
)
def test_drafts_change_no_text_of_sequences(
    make: Make, expected: Answers, options: dict[str, Any]
) -> None:
    generation = Generation(make, speculation=HalfRightProposer(expected), **options)
    for _ in range(2):
        assert generation.answers(PROMPTS) == expected
    counts = generation.scheduler.counts
    assert 0 < counts.accepted_drafts < counts.drafts
    assert counts.steps < 2 * NUM_TOKENS * len(PROMPTS) or "budget" in options


@pytest.mark.parametrize("what", ["die", "fail"])
def test_sequences_with_drafts_answer_after_lost_steps(
    make: Make, expected: Answers, what: str
) -> None:
    generation = Generation(make, speculation=HalfRightProposer(expected))
    sequences = [generation.add(prompt) for prompt in PROMPTS]
    for _ in range(2):
        for _ in range(3):
            generation.step()
        getattr(generation, what)()
    generation.run()
    assert [list(sequence.generated) for sequence in sequences] == expected
    assert generation.scheduler.counts.accepted_drafts > 0


def test_drafts_of_sequences_skip_no_checkpoint(make: Make, expected: Answers) -> None:
    """The newest border of a text keeps its state, though drafts went past it."""
    generation = Generation(make, speculation=HalfRightProposer(expected))
    generation.answers(PROMPTS)
    generation.scheduler._speculation = None
    turn = generation.add([*PROMPTS[2], *expected[2], 5, 6, 7])
    generation.run()
    assert turn.num_cached == (53 + 24 - 1) // 16 * 16


def test_sequences_answer_the_same_with_ngrams(make: Make, expected: Answers) -> None:
    """What a text repeats is drafted, where no preempted sequence waits for the rows."""
    prompts = [
        [*prompt, *answer, *prompt] for prompt, answer in zip(PROMPTS, expected, strict=True)
    ]
    drafting = Generation(make, num_pages=2 * NUM_PAGES, speculation=Speculation())
    assert drafting.answers(prompts) == Generation(make).answers(prompts)
    assert drafting.scheduler.counts.drafts > 0
