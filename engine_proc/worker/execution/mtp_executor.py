"""The layer of a model that predicts a token beyond the next, as an executor that drafts."""

from dataclasses import replace

from headrace.engine_proc.worker.execution.executor import Batch, Executor, Floats, Logits


class MtpExecutor(Executor):
    """Drafts from the hidden states that a model's steps leave in its pages.

    A token is joined with the hidden state of the one before it. So its keys and values lie one
    position before its own, and a text's first token has none.

    Args:
        model: the executor of a `DecoderSpec` with `num_mtp_layers`.
    """

    def __init__(self, model: Executor) -> None:
        self._model = model

    def logits(self, batch: Batch) -> Logits:
        """Return the logits behind tokens, of which none is its text's first."""
        return self._model.logits(replace(batch, positions=batch.positions - 1, is_draft=True))

    def embed(self, batch: Batch) -> Floats:
        """Return the hidden states that `logits` would be computed from."""
        return self._model.embed(replace(batch, positions=batch.positions - 1, is_draft=True))
