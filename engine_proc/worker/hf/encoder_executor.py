"""Runs encoders (BERT and its kin) in transformers' modules: text in, one vector out.

The sequences of a batch lie one behind the other, without padding, and each sees only itself.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.engine_proc.worker.execution.executor import Batch, Floats, sequence_rows
from headrace.engine_proc.worker.hf.executor import to_floats
from headrace.engine_proc.worker.hf.hook import AttentionCall, using_attention
from headrace.engine_proc.worker.hf.model import TransformersModel
from headrace.engine_proc.worker.reference.torch_attention import attend, to_tensor
from headrace.model.pooling import PoolingKind


class WithinSequences:
    """An `Attention` that keeps nothing: all there is to see is in the batch."""

    def __init__(self, model: TransformersModel, rows: list[slice]) -> None:
        self.model = model
        self.rows = rows

    def attend(self, call: AttentionCall) -> Tensor:
        """Return what the tokens see of their own sequence."""
        reach = self.model.layers[call.module].reach
        parts = [
            attend(
                call.query[rows],
                call.key[rows],
                call.value[rows],
                torch.arange(rows.stop - rows.start, device=call.query.device),
                scale=call.scale,
                reach=reach,
                softcap=call.softcap,
                sinks=call.sinks,
            )
            for rows in self.rows
        ]
        return torch.cat(parts)


class EncoderExecutor:
    """Embeds whole sequences; it has no cache, and reads no page table."""

    def __init__(self, model: TransformersModel, pooling: PoolingKind) -> None:
        self.model = model
        self.module = model.module
        self.pooling = pooling
        # RoBERTa and its kin number positions from the padding token's id + 1 on.
        embeddings: Any = getattr(self.module, "embeddings", None)
        starts_late = hasattr(embeddings, "create_position_ids_from_input_ids")
        self.first_position: int = embeddings.padding_idx + 1 if starts_late else 0

    @torch.inference_mode()
    def hidden_states(self, batch: Batch) -> Tensor:
        """Return the last hidden state of every token, [tokens, hidden]."""
        device = self.module.device
        rows = sequence_rows(batch)
        assert not batch.positions[[r.start for r in rows]].any(), "sequences come whole"
        with using_attention(WithinSequences(self.model, rows)):
            output: Tensor = self.module(
                to_tensor(batch.token_ids, device)[None],
                position_ids=to_tensor(batch.positions + self.first_position, device)[None],
            )[0][0]
        return output

    def embed(self, batch: Batch) -> Floats:
        """Return the pooled vector of each sequence, in the batch's order, [sequences, hidden]."""
        hidden = to_floats(self.hidden_states(batch))
        return np.stack([pooled(hidden[rows], self.pooling) for rows in sequence_rows(batch)])


def pooled(hidden: Floats, kind: PoolingKind) -> Floats:
    """Return one vector for the tokens of a sequence, [tokens, hidden] -> [hidden]."""
    vector: Floats
    match kind:
        case PoolingKind.MEAN:
            vector = hidden.mean(axis=0)
        case PoolingKind.FIRST:
            vector = hidden[0]
        case PoolingKind.LAST:
            vector = hidden[-1]
    return vector
