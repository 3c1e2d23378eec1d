"""EAGLE-3's layer, as an executor that drafts; see `mtp_executor.py` for positions."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.execution.executor import Batch, Executor, Floats, Logits
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec


class EagleExecutor(Executor):
    """Drafts tokens of a model by a head that knows some of them.

    Args:
        layer: the executor of a `DecoderSpec` with `eagle`, into whose pages the model's steps
            write hidden states.
        token_ids: the model's ids of the head's tokens.
        vocab_size: of the model.
    """

    def __init__(self, layer: Executor, token_ids: npt.NDArray[np.int64], vocab_size: int) -> None:
        self._layer = layer
        self._token_ids = token_ids
        self._vocab_size = vocab_size

    def logits(self, batch: Batch) -> Logits:
        """Return the logits behind tokens, of which none is its text's first.

        Tokens that the head does not know are never drawn.
        """
        drafting = replace(batch, positions=batch.positions - 1, is_draft=True)
        own = self._layer.logits(drafting).rows[:, : len(self._token_ids)]
        rows = np.full((len(own), self._vocab_size), -np.inf, np.float32)
        rows[:, self._token_ids] = own
        return Logits(rows)

    def embed(self, batch: Batch) -> Floats:
        """Return the hidden states that `logits` would be computed from."""
        return self._layer.embed(replace(batch, positions=batch.positions - 1, is_draft=True))


def eagle_fields(spec: DecoderSpec) -> dict[str, int]:
    """Return the fields of `Config` for EAGLE-3's layer."""
    if spec.eagle is None:
        return {}
    assert not spec.tied_head, "the head has fewer rows than the embedding"
    return {"eagle": 1 + spec.eagle.norms_residual, "num_embedded": spec.eagle.num_embedded}
