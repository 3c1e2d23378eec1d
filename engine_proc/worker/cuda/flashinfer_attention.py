"""Attention by FlashInfer, for steps that are mostly prompts, if the flags select it.

Its kernels are made for many queries. Which bits they give it does not say: with them a text may
depend on its batch mates, and on how its prompt was cut. A step is planned on the host, so steps in
graphs stay with our own kernel. So do steps in which most sequences have a token each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.host_to_device import StreamEvent
from headrace.engine_proc.worker.execution.executor import Batch, Int32s
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec

HEAD_DIMS = (64, 128, 256)  # that there are kernels of for every GPU it supports
WORKSPACE_BYTES = 394 << 20  # vLLM's: what its documentation has is too little for long prompts
MANY_QUERIES = 16  # of a sequence, as a mean; not measured


def why_not(spec: DecoderSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Return why it cannot attend for a decoder; "" is that it can."""
    if spec.attention_sinks:
        return "the model has attention sinks"
    if spec.latent is not None:
        return "the model has latent attention"
    if any(layer.is_chunked for layer in spec.layers):
        return "the model attends in chunks"
    if len({spec.kv_heads_of(layer) for layer in spec.layers}) > 1:
        return "the model has heads of several sizes"
    if spec.head_dim not in HEAD_DIMS:
        return f"the model's heads have {spec.head_dim} numbers, and not 64, 128 or 256"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"products are in {str(dtype).removeprefix('torch.')}, and not in 16 bits"
    return "" if kv_dtype == dtype else "keys and values are in 8 bits"


def is_for(step: Sizes) -> bool:
    """Whether a step without a graph has prompts enough."""
    return step.num_tokens >= MANY_QUERIES * step.num_sequences


class Columns(NamedTuple):
    """The index arrays of a batch, in FlashInfer's format."""

    query_starts: Int32s  # [sequences + 1]
    page_starts: Int32s  # [sequences + 1], in `pages`
    pages: Int32s
    last_page_tokens: Int32s  # [sequences], 1 to page_tokens


def columns_of(batch: Batch, page_tokens: int) -> Columns:
    """Return a batch's sequences one after the other."""
    firsts = np.flatnonzero(np.diff(batch.sequences, prepend=-1))
    query_starts = np.append(firsts, len(batch.sequences))
    num_keys = batch.positions[query_starts[1:] - 1] + 1
    num_pages = (num_keys - 1) // page_tokens + 1
    table = batch.page_table[batch.sequences[firsts]]
    return Columns(
        query_starts.astype(np.int32),
        np.append(0, np.cumsum(num_pages)).astype(np.int32),
        table[np.arange(table.shape[1]) < num_pages[:, None]],
        ((num_keys - 1) % page_tokens + 1).astype(np.int32),
    )


class FlashInferAttention:
    """Attends for all layers of a decoder, in one step after another.

    Args:
        spec: of a decoder that `why_not` has nothing against.
        library: the module `flashinfer`.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        page_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        library: Any,
        make_event: Callable[[], StreamEvent] = torch.cuda.Event,
    ) -> None:
        self._spec = spec
        self._page_tokens = page_tokens
        self._dtype = dtype
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers = {
            window: library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            for window in {layer.window for layer in spec.layers}
        }
        self._planned = make_event()

    def plan(self, batch: Batch) -> None:
        """Prepare for the layers of a step."""
        self._planned.synchronize()  # plans are written to where the last were sent from
        spec = self._spec
        columns = [torch.from_numpy(column) for column in columns_of(batch, self._page_tokens)]
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                *columns,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                self._page_tokens,
                causal=True,
                sm_scale=spec.attention_scale,
                window_left=-1 if window is None else window - 1,
                logits_soft_cap=spec.attention_softcap,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        self._planned.record()

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Do as `attention.attend`, in the step that was planned last."""
        out: Tensor = self._wrappers[window].run(q, (keys, values))
        return out
