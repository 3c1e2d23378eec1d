"""Runs encoders in the C++ core: whole texts in, one vector each out."""

from dataclasses import replace

import numpy as np

from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Floats, sequence_rows
from headrace.model.pooling import PoolingKind


class CpuEncoder:
    """Embeds whole sequences; it reads no page table, and keeps nothing from step to step.

    The keys and values of a layer lie in pages until the layer's attention is done. They are those
    of `executor`, one behind the other: as many as a step's texts need.
    """

    def __init__(self, executor: CpuExecutor, pooling: PoolingKind) -> None:
        self._executor = executor
        self._pooling = pooling

    def embed(self, batch: Batch) -> Floats:
        """Return the pooled vector of each sequence, in the batch's order, [sequences, hidden]."""
        texts = sequence_rows(batch)
        assert not batch.positions[[text.start for text in texts]].any(), "sequences come whole"
        hidden = self._executor.embed(self._within(batch, texts))
        if self._pooling is not PoolingKind.MEAN:
            return hidden
        return np.stack([hidden[text].mean(axis=0) for text in texts])

    def _within(self, batch: Batch, texts: list[slice]) -> Batch:
        """Return the batch with pages of our own, in which a token sees its whole text."""
        lengths = np.array([text.stop - text.start for text in texts])
        num_pages = -(-lengths // self._executor.page_tokens)
        first_pages = np.cumsum(num_pages) - num_pages
        match self._pooling:
            case PoolingKind.MEAN:
                rows = np.arange(len(batch.token_ids))
            case PoolingKind.FIRST:
                rows = np.array([text.start for text in texts])
            case PoolingKind.LAST:
                rows = np.array([text.stop - 1 for text in texts])
        return replace(
            batch,
            sequences=np.repeat(np.arange(len(texts), dtype=np.int32), lengths),
            page_table=(first_pages[:, None] + np.arange(num_pages.max())).astype(np.int32),
            logit_rows=rows.astype(np.int32),
            last_seen=np.repeat(lengths - 1, lengths).astype(np.int32),
        )


def most_pages(num_tokens: int, num_sequences: int, page_tokens: int) -> int:
    """Return the most pages that so many tokens of at most so many sequences take."""
    return num_tokens // page_tokens + min(num_tokens, num_sequences)
