"""Every tiny decoder of transformers that tests have, by case, and what it answers."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from dense_models import DENSE, tiny_dense
from gemma_models import GEMMAS, tiny_gemma
from generation import NUM_TOKENS, PROMPTS, Generation
from hybrid_models import HYBRIDS, tiny_hybrid
from latent_models import LATENT, tiny_latent
from mixture_models import MIXTURES, tiny_mixture
from reference import endless_answers

from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.model import DecoderModel, open_model

Answers = list[list[int]]
MAKERS: tuple[tuple[dict[str, Any], Callable[..., Any]], ...] = (
    (DENSE, tiny_dense),
    (GEMMAS, tiny_gemma),
    (MIXTURES, tiny_mixture),
    (HYBRIDS, tiny_hybrid),
    (LATENT, tiny_latent),
)
SCALES_EMBEDDINGS = {"gemma", "gemma2", "gemma3_text", "minicpm3"}


def tiny_decoder(case: str, **differences: Any) -> Any:
    """Make the random model of a case. A tied head of large embeddings repeats a token."""
    if case in SCALES_EMBEDDINGS:
        differences = {"tie_word_embeddings": False} | differences
    return next(make for cases, make in MAKERS if case in cases)(case, **differences)


@dataclass(frozen=True)
class DecoderCase:
    """A tiny decoder in a folder of its own, which ends with the process."""

    model: Any
    home: tempfile.TemporaryDirectory[str]

    @property
    def folder(self) -> Path:
        return Path(self.home.name)

    @cached_property
    def ours(self) -> DecoderModel:
        return open_model(self.folder)

    @cached_property
    def logits(self) -> npt.NDArray[np.float32]:
        """Those of the longest prompt, in transformers."""
        with torch.inference_mode():
            logits: npt.NDArray[np.float32] = self.model(torch.tensor([PROMPTS[2]])).logits[0]
        logits = np.asarray(logits)
        assert np.abs(logits).max() > 1, "a model that says nothing agrees with anything"
        return logits

    @cached_property
    def answers(self) -> Answers:
        """The greedy texts of transformers."""
        answers = endless_answers(self.model, PROMPTS, NUM_TOKENS)
        assert all(len(set(answer)) > 2 for answer in answers), "a model that repeats itself"
        return answers

    def make(self, **options: Any) -> CpuExecutor:
        """Make an executor in the core."""
        return CpuExecutor(self.ours.spec, self.ours.weights, **{"threads": 1, **options})


@cache
def decoder_case(case: str) -> DecoderCase:
    """Return a case, made once in a process."""
    made = DecoderCase(tiny_decoder(case), tempfile.TemporaryDirectory())
    made.model.save_pretrained(made.folder)
    return made


def answers_of(path: Path) -> Answers:
    """Return the texts of a file or a folder in the core."""
    ours = open_model(path)
    return Generation(partial(CpuExecutor, ours.spec, ours.weights, threads=1)).answers(PROMPTS)


def part_of_prompt(start: int, end: int, **options: Any) -> Batch:
    """Return a step of the longest prompt's tokens; the one at 0 begins a state."""
    return Batch(
        token_ids=np.array(PROMPTS[2][start:end], np.int32),
        positions=np.arange(start, end, dtype=np.int32),
        sequences=np.zeros(end - start, np.int32),
        page_table=np.array([[5, 0, 3, 2]], np.int32),
        logit_rows=np.arange(end - start, dtype=np.int32),
        state_in=np.array([0 if start else -1], np.int32),
        state_out=np.array([1 if start else 0], np.int32),
        **options,
    )
