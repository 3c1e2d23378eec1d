"""A text is the same with a draft model and without one, whatever is asked for beside it."""

import itertools
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreseeing_models import VOCAB_SIZE as FORESEEN_TOKENS
from foreseeing_models import next_token, save_foreseeing
from hypothesis import given, settings
from hypothesis import strategies as st
from random_decoders import SPEC, random_eagle, random_weights, stored
from scheduler_rig import make_sequence

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.draft_model import DraftModel
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.scheduling.speculation import Speculation
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.shm.cache_memory import FINGERPRINT_BYTES, CacheMemory
from headrace.engine_proc.step.step_builder import StepBuilder
from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.execution.cache_sizes import cache_bytes
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype
from headrace.engine_proc.worker.execution.cpu_sampler import Sampler
from headrace.engine_proc.worker.execution.eagle_executor import EagleExecutor
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype
from headrace.engine_proc.worker.execution.mtp_executor import MtpExecutor
from headrace.engine_proc.worker.execution.runner import GenerationRunner
from headrace.engine_proc.worker.models.eagle import open_eagle
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.mtp import with_mtp_layer
from headrace.ipc.messages import Sampling, request_id

PAGE_TOKENS, NUM_PAGES = 16, 12
NUM_TOKENS = 20
PROMPTS = [[5, 6, 7, 8] * 4, list(range(40)), [9, 3]]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=3, logprobs=2),
    Sampling(temperature=1.0, seed=4, frequency_penalty=0.5, repetition_penalty=1.2),
    Sampling(temperature=0.9, seed=5, logit_bias={7: 3.0}, min_tokens=8),
    Sampling(temperature=0.8, seed=6, bad_words=[[7], [5, 6]], prompt_logprobs=1),
]
OWN_PAGES, SHARED_PAGES = "own pages", "shared pages"  # of a draft model
MTP, RANDOM_MTP = "mtp", "random mtp"  # a layer of the model drafts
EAGLE = "random eagle"  # a layer in pages of its own drafts
FROM_HIDDEN = (MTP, RANDOM_MTP, EAGLE)
RIGHT = (OWN_PAGES, SHARED_PAGES, MTP)  # drafts are often right


@cache
def make_runner(pages: str) -> GenerationRunner:
    """Make a model, and what drafts for it: its own weights in 4 bits, or a layer of it."""
    options: dict[str, Any] = {"num_pages": NUM_PAGES, "page_tokens": PAGE_TOKENS, "threads": 1}
    sampler = Sampler(SPEC.vocab_size, threads=1)
    if pages in (MTP, RANDOM_MTP):
        spec = with_mtp_layer(SPEC)
        weights = random_weights(spec)
        model = CpuExecutor(spec, foreseeing(weights) if pages == MTP else weights, **options)
        return GenerationRunner(model, sampler, draft_model=MtpExecutor(model))
    weights = random_weights(SPEC)
    if pages == EAGLE:
        model = CpuExecutor(SPEC, weights, **options)
        eagle = EagleExecutor(*random_eagle(model, **options), SPEC.vocab_size)
        return GenerationRunner(model, sampler, draft_model=eagle)
    if pages == SHARED_PAGES:
        size = cache_bytes(SPEC, NUM_PAGES, 0, PAGE_TOKENS, KVDtype.FLOAT32)
        fd = os.memfd_create("pages")
        options["memory"] = CacheMemory(fd, size, bytes(FINGERPRINT_BYTES))
    model = CpuExecutor(SPEC, weights, **options)
    draft_model = CpuExecutor(SPEC, weights, weight_dtype=WeightDtype.INT4, **options)
    return GenerationRunner(model, sampler, draft_model=draft_model)


def foreseeing(weights: Weights) -> Weights:
    """Return weights of a model that looks at its last token alone, as its last layer does, too.

    So the layer drafts what the model draws.
    """
    foreseen = dict(weights)
    for name, weight in weights.items():
        if name.endswith((".o", ".down")):
            foreseen[name] = stored(np.zeros(weight.shape, np.float32))
    size = SPEC.hidden_size
    foreseen["mtp.proj"] = stored(np.eye(size, 2 * size, dtype=np.float32))
    foreseen["mtp.embed_norm"] = stored(np.ones(size, np.float32))
    foreseen["mtp.norm"] = weights["norm"]
    return foreseen


@cache
def foreseeing_runner(folder: Path, drafts: str) -> GenerationRunner:
    """Make a model, and a layer that drafts what it draws where all hidden states are right."""
    model, eagle = folder / "model", folder / "eagle"
    if not model.exists():
        save_foreseeing(model, eagle)
    options: dict[str, Any] = {"num_pages": NUM_PAGES, "page_tokens": PAGE_TOKENS, "threads": 1}
    ours = open_model(model, drafts=drafts == MTP)
    executor = CpuExecutor(ours.spec, ours.weights, **options)
    sampler = Sampler(ours.spec.vocab_size, threads=1)
    if drafts == MTP:
        return GenerationRunner(executor, sampler, draft_model=MtpExecutor(executor))
    layer, token_ids = open_eagle(eagle, ours)
    drafter = CpuExecutor(layer.spec, layer.weights, **options)
    executor.be_drafted_by(drafter)
    drafts_with = EagleExecutor(drafter, token_ids, ours.spec.vocab_size)
    return GenerationRunner(executor, sampler, draft_model=drafts_with)


class Generation:
    """An engine without its links, whose worker can be lost in the middle of a step."""

    def __init__(
        self,
        runner: GenerationRunner,
        drafts: str,
        num_pages: int,
        budget: int,
        vocab_size: int = SPEC.vocab_size,
    ) -> None:
        self._runner = runner
        pool = PagePool(num_pages, PAGE_TOKENS)
        speculation = None
        if drafts:
            has_pages, from_hidden = drafts != SHARED_PAGES, drafts in FROM_HIDDEN
            model = DraftModel(pool, vocab_size, has_pages, from_hidden)
            speculation = Speculation(model, max_length=5)
        limits = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=budget)
        self.scheduler = Scheduler(pool, limits, speculation=speculation)
        self._builder = StepBuilder(limits.max_num_seqs)

    def answers(self, sequences: list[Sequence], losses: set[int]) -> list[tuple[Any, ...]]:
        """Return the tokens of sequences that come together, and what is reported of them."""
        reported: dict[int, bytes] = {sequence.id: b"" for sequence in sequences}
        for sequence in sequences:
            self.scheduler.add(sequence)
        for number in itertools.count():
            if not self.scheduler.has_work:
                break
            chunks = self.scheduler.schedule()
            step = self._builder.build(chunks)
            result = ResultReader(self._runner.run(step), 0)
            self.scheduler.observe(chunks, 0.01 if step.is_draft else 0.1)
            if number in losses:
                self.scheduler.lose_workers(blames=False)
                self._builder.start_over()
            elif step.is_draft:
                self.scheduler.take_drafts(chunks, result)
            else:
                for news in self.scheduler.update(chunks, result):
                    reported[news.sequence.id] += news.logprobs
                    news.sequence.has_started = True
        return [(list(s.generated), reported[s.id], bytes(s.prompt_logprobs)) for s in sequences]


def make_sequences(samplings: list[Sampling], prompts: list[list[int]] = PROMPTS) -> list[Sequence]:
    pairs = zip(prompts, samplings, strict=True)
    return [
        make_sequence(prompt, NUM_TOKENS, request_id(0, i), [0], sampling)
        for i, (prompt, sampling) in enumerate(pairs)
    ]


@pytest.mark.parametrize("drafts", [*RIGHT, RANDOM_MTP, EAGLE])
@settings(max_examples=12, deadline=None)
@given(
    samplings=st.lists(st.sampled_from(SAMPLINGS), min_size=3, max_size=3),
    num_pages=st.sampled_from([5, NUM_PAGES]),
    budget=st.sampled_from([8, 24, 64]),
    losses=st.sets(st.integers(0, 30), max_size=3),
)
def test_drafts_of_a_model_change_no_text(
    drafts: str,
    samplings: list[Sampling],
    num_pages: int,
    budget: int,
    losses: set[int],
) -> None:
    runner = make_runner(drafts)
    expected = [
        Generation(runner, "", NUM_PAGES, 64).answers([sequence], set())[0]
        for sequence in make_sequences(samplings)
    ]
    generation = Generation(runner, drafts, num_pages, budget)
    assert generation.answers(make_sequences(samplings), losses) == expected


@pytest.mark.parametrize("drafts", RIGHT)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_model_s_own_weights_draft_what_it_draws(drafts: str, temperature: float) -> None:
    generation = Generation(make_runner(drafts), drafts, NUM_PAGES, 64)
    sampling = Sampling(temperature=temperature, seed=1)
    generation.answers(make_sequences([sampling] * 3), set())
    counts = generation.scheduler.counts
    assert counts.accepted_drafts >= 10
    assert counts.steps < NUM_TOKENS


@pytest.fixture(scope="module")
def foreseeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreseeing")


@pytest.mark.parametrize("drafts", [MTP, EAGLE])
@settings(max_examples=8, deadline=None)
@given(
    num_pages=st.sampled_from([6, NUM_PAGES]),
    budget=st.sampled_from([8, 24, 64]),
    losses=st.sets(st.integers(0, 30), max_size=3),
)
def test_layers_read_the_hidden_states_of_their_texts(
    drafts: str, foreseeing_folder: Path, num_pages: int, budget: int, losses: set[int]
) -> None:
    """The second time, texts begin with pages that others have left.

    A prompt's last token follows from the one before it. No layer looks at it.
    """
    runner = foreseeing_runner(foreseeing_folder, drafts)
    generation = Generation(runner, drafts, num_pages, budget, FORESEEN_TOKENS)
    for further in ([], [60], [70]):
        prompts = [[*prompt, *further] for prompt in PROMPTS]
        prompts = [[*prompt, next_token(prompt[-1])] for prompt in prompts]
        answers = generation.answers(make_sequences([Sampling()] * 3, prompts), losses)
        assert [tokens for tokens, *_ in answers] == [foreseen(prompt[-1]) for prompt in prompts]
    counts = generation.scheduler.counts
    assert counts.accepted_drafts == counts.drafts > NUM_TOKENS


def foreseen(token: int) -> list[int]:
    """Return what follows a token."""
    tokens = [token]
    while len(tokens) <= NUM_TOKENS:
        tokens.append(next_token(tokens[-1]))
    return tokens[1:]


def test_drafts_beyond_the_vocabulary_end_the_drafting(foreseeing_folder: Path) -> None:
    """The draft model draws the same token again, however often it is asked."""
    runner = foreseeing_runner(foreseeing_folder, EAGLE)
    generation = Generation(runner, EAGLE, NUM_PAGES, 64, vocab_size=FORESEEN_TOKENS // 2)
    answers = generation.answers(make_sequences([Sampling()] * 3), set())
    assert [tokens for tokens, *_ in answers] == [foreseen(prompt[-1]) for prompt in PROMPTS]
    assert generation.scheduler.counts.accepted_drafts > 0
