"""Runs encoders in the C++ core: whole texts in, one vector each out."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

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
        rows = self._rows(batch, texts).astype(np.int32)
        whole = seen_whole(batch, self._executor.page_tokens)
        hidden = self._executor.embed(replace(whole, logit_rows=rows))
        if self._pooling is not PoolingKind.MEAN:
            return hidden
        return np.stack([hidden[text].mean(axis=0) for text in texts])

    def _rows(self, batch: Batch, texts: list[slice]) -> npt.NDArray[np.int64]:
        """Return the tokens whose hidden states are pooled."""
        match self._pooling:
            case PoolingKind.MEAN:
                return np.arange(len(batch.token_ids))
            case PoolingKind.FIRST:
                return np.array([text.start for text in texts])
            case PoolingKind.LAST:
                return np.array([text.stop - 1 for text in texts])


def seen_whole(batch: Batch, page_tokens: int) -> Batch:
    """Return a batch of whole texts in which a token sees all of its own, on pages in order."""
    lengths = np.array([text.stop - text.start for text in sequence_rows(batch)])
    num_pages = -(-lengths // page_tokens)
    first_pages = np.cumsum(num_pages) - num_pages
    return replace(
        batch,
        sequences=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        page_table=(first_pages[:, None] + np.arange(num_pages.max())).astype(np.int32),
        last_seen=np.repeat(lengths - 1, lengths).astype(np.int32),
    )


def most_pages(num_tokens: int, num_sequences: int, page_tokens: int) -> int:
    """Return the most pages that so many tokens of at most so many sequences take."""
    return num_tokens // page_tokens + min(num_tokens, num_sequences)
