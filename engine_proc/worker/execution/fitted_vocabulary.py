"""A draft model's logits, for the vocabulary of the model that it drafts for."""

import numpy as np

from headrace.engine_proc.worker.execution.executor import Batch, Executor, Floats, Logits


class FittedVocabulary(Executor):
    """An executor whose logits are cut or padded: models pad one vocabulary to different sizes.

    Args:
        vocab_size: of the logits.
    """

    def __init__(self, inner: Executor, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size

    def logits(self, batch: Batch) -> Logits:
        """Do as the executor; tokens that it does not know are never drawn."""
        logits = self._inner.logits(batch)
        rows, missing = logits.rows, self._vocab_size - logits.rows.shape[1]
        if not missing:
            return logits
        if missing < 0:
            return Logits(rows[:, : self._vocab_size])
        return Logits(np.pad(rows, ((0, 0), (0, missing)), constant_values=-np.inf))

    def embed(self, batch: Batch) -> Floats:
        """Do as the executor."""
        return self._inner.embed(batch)
