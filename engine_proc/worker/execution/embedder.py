"""Runs an embedding model: texts in, vectors out."""

from typing import Protocol

import numpy as np

from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.dense_layers import DenseLayer


class HiddenStates(Protocol):
    """An executor that stops before the head."""

    def embed(self, batch: Batch) -> Floats:
        """Return one vector for each row of `batch.logit_rows`, [rows, hidden].

        A decoder gives the last hidden state of that row. An encoder takes whole sequences and
        gives each its pooled vector, whichever of its tokens the row is.
        """
        ...


class Embedder:
    """An executor, with the layers behind the pooling of its hidden states."""

    def __init__(
        self, executor: HiddenStates, *, normalize: bool, dense: tuple[DenseLayer, ...] = ()
    ) -> None:
        self._executor = executor
        self._normalize = normalize
        self._dense = dense

    def embed(self, batch: Batch) -> Floats:
        """Return the vectors of the texts whose last token is in `batch.logit_rows`, in order."""
        vectors = self._executor.embed(batch)
        if len(vectors) == 0:  # a step within a long prompt
            return vectors
        for layer in self._dense:
            vectors = np.stack([layer(vector) for vector in vectors])
        if self._normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, 1e-12)
        return vectors
