"""Runs steps on a loaded model: to tokens, or to embeddings."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from headrace.engine_proc.worker.execution.cpu_sampler import NO_MASKS, ROW, Masks, Sampler
from headrace.engine_proc.worker.execution.embedder import Embedder
from headrace.engine_proc.worker.execution.executor import Batch, Executor, Floats, Int32s
from headrace.ipc.worker_messages import Step, StepResult

MaskSource = Callable[[int], Masks]  # waits for so many masks


def no_masks(num_rows: int) -> Masks:
    """Return the masks of a step that has none."""
    assert num_rows == 0
    return NO_MASKS


class PendingResult(Protocol):
    """The result of a step that a device still computes."""

    @property
    def is_there(self) -> bool:
        """Whether `wait` would not wait."""
        ...

    def wait(self) -> StepResult:
        """Wait for the result and return it."""
        ...


class Runner(Protocol):
    """Runs the steps of a worker: from `Step` to `StepResult`."""

    def run(self, step: Step, masks_of: MaskSource = no_masks) -> StepResult | PendingResult: ...


class GenerationRunner:
    """Samples a token for each logit row.

    Args:
        embeds: the embedding area, [rows, row_size of the spec].
        draft_model: runs the steps that are drafts.
    """

    def __init__(
        self,
        executor: Executor,
        sampler: Sampler,
        embeds: Floats | None = None,
        draft_model: Executor | None = None,
    ) -> None:
        self._executor = executor
        self._draft_model = draft_model
        self._sampler = sampler
        self._embeds = embeds
        self._drawn = np.empty(0, np.int32)  # in the last step, [rows]

    def run(self, step: Step, masks_of: MaskSource = no_masks) -> StepResult:
        """Run one step. The masks are fetched after the logits are computed."""
        batch = batch_of(step, step.logit_rows, self._embeds)
        if step.token_sources:
            token_sources = np.frombuffer(step.token_sources, np.int32)
            batch = replace(batch, token_ids=relayed(batch.token_ids, token_sources, self._drawn))
        executor = self._draft_model if step.is_draft else self._executor
        assert executor is not None
        logits = executor.logits(batch)
        if step.history_updates:
            self._sampler.update_histories(
                np.frombuffer(step.history_updates, np.int32),
                known(np.frombuffer(step.history, np.int32), self._drawn),
            )
        masked_rows = np.frombuffer(step.masked_rows, np.int32)
        token_ids, logprobs = self._sampler.sample(
            logits.rows,
            np.frombuffer(step.rows, ROW),
            np.frombuffer(step.bias_tokens, np.int32),
            np.frombuffer(step.bias, np.float32),
            masked_rows,
            masks_of(len(masked_rows)) if len(masked_rows) else NO_MASKS,
            logits.maxima,
        )
        self._drawn = token_ids
        return StepResult(token_ids.tobytes(), logprobs)


class EmbeddingRunner:
    """Makes a vector for each pooled row."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    def run(self, step: Step, _masks_of: MaskSource = no_masks) -> StepResult:
        """Run one step."""
        vectors = self._embedder.embed(batch_of(step, step.pooled_rows))
        return StepResult(b"", b"", np.ascontiguousarray(vectors, np.float32).tobytes())


def batch_of(step: Step, rows: bytes, embeds: Floats | None = None) -> Batch:
    """Return a step's tokens, with the rows that are wanted of them."""
    rope_positions = optional(step.rope_positions)
    return Batch(
        token_ids=np.frombuffer(step.token_ids, np.int32),
        positions=np.frombuffer(step.positions, np.int32),
        sequences=np.frombuffer(step.sequences, np.int32),
        page_table=page_table_of(step),
        logit_rows=np.frombuffer(rows, np.int32),
        token_types=optional(step.token_types),
        embed_rows=optional(step.embed_rows),
        embeds=embeds,
        rope_positions=None if rope_positions is None else rope_positions.reshape(-1, 3),
        last_seen=optional(step.last_seen),
        state_in=optional(step.state_in),
        state_out=optional(step.state_out),
        state_ends=optional(step.state_ends),
        adapters=optional(step.adapters),
    )


def page_table_of(step: Step) -> Int32s:
    """Return a row of pages for each sequence of a step, with zeros behind the shorter ones.

    Raises:
        ValueError: the counts are not those of the sequences, or of the pages.
    """
    pages, counts = np.frombuffer(step.page_table, np.int32), optional(step.page_counts)
    num_sequences = int(np.frombuffer(step.sequences, np.int32)[-1]) + 1
    if counts is None:
        return pages.reshape(num_sequences, -1)
    total = int(counts.sum(dtype=np.int64))
    if len(counts) != num_sequences or counts.min() < 0 or total != len(pages):
        what = f"{len(counts)} counts of {total} pages"
        raise ValueError(f"{what} for {num_sequences} sequences with {len(pages)} pages")
    table = np.zeros((len(counts), int(counts.max())), np.int32)
    shifts = np.arange(len(counts)) * table.shape[1] - (counts.cumsum() - counts)
    table.reshape(-1)[np.repeat(shifts, counts) + np.arange(len(pages))] = pages
    return table


def relayed(token_ids: Int32s, token_sources: Int32s, drawn: Int32s) -> Int32s:
    """Return a step's tokens, with those that the step before has drawn in their places."""
    filled = token_ids.copy()
    places = np.flatnonzero(token_sources >= 0)
    filled[places] = drawn[token_sources[places]]
    return filled


def known(history: Int32s, drawn: Int32s) -> Int32s:
    """Return a history with the tokens that the step before has drawn, of which it has the rows."""
    return relayed(history, -1 - history, drawn) if (history < 0).any() else history


def optional(column: bytes) -> Int32s | None:
    """Return the numbers of a column that may be empty."""
    return np.frombuffer(column, np.int32) if column else None
