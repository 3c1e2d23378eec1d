"""Runs transformers' own modules on our paged cache: what no `DecoderSpec` expresses.

Slower than the C++ core, for models that would otherwise not run at all.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.engine_proc.worker.execution.executor import Batch, Floats, Logits
from headrace.engine_proc.worker.hf.adapted_layers import AdaptedLayers
from headrace.engine_proc.worker.hf.hook import (
    AttentionCall,
    AttentionLayer,
    using_attention,
)
from headrace.engine_proc.worker.hf.model import DTYPES, TransformersModel
from headrace.engine_proc.worker.reference.torch_attention import Places, attend, place, to_tensor


class PagedAttention:
    """Keys and values of all layers, in pages; an `Attention` for the batch at `places`."""

    def __init__(
        self,
        layers: Mapping[nn.Module, AttentionLayer],
        num_pages: int,
        page_tokens: int,
        like: Tensor,
    ) -> None:
        """Allocate pages of the dtype and on the device of `like`."""
        self.places: Places
        self.layers = {
            module: (
                layer,
                like.new_zeros(num_pages, page_tokens, layer.kv_heads, layer.head_dim),
                like.new_zeros(num_pages, page_tokens, layer.kv_heads, layer.value_dim),
            )
            for module, layer in layers.items()
        }

    def attend(self, call: AttentionCall) -> Tensor:
        """Write the tokens' keys and values; return what the tokens see."""
        layer, keys, values = self.layers[call.module]
        keys[self.places.pages, self.places.slots] = call.key.to(keys.dtype)
        values[self.places.pages, self.places.slots] = call.value.to(values.dtype)
        out = call.query.new_empty(*call.query.shape[:2], layer.value_dim)
        for stretch in self.places.stretches:
            out[stretch.rows] = attend(
                call.query[stretch.rows],
                keys[stretch.pages].flatten(0, 1)[: stretch.num_keys].to(call.query.dtype),
                values[stretch.pages].flatten(0, 1)[: stretch.num_keys].to(call.query.dtype),
                stretch.positions,
                scale=call.scale,
                reach=layer.reach,
                last_seen=stretch.last_seen,
                softcap=call.softcap,
                sinks=call.sinks,
            )
        return out


class TransformersExecutor:
    """An `Executor` of whatever keeps nothing but keys and values from step to step."""

    def __init__(
        self,
        model: TransformersModel,
        *,
        num_pages: int,
        page_tokens: int,
        kv_dtype: str = "float32",
        adapters: AdaptedLayers | None = None,
    ) -> None:
        """Allocate pages of `kv_dtype`, one of `DTYPES`."""
        self._adapters = adapters
        self.module = model.module
        self.page_tokens = page_tokens
        self._layers = model.layers
        self._like = torch.empty(0, dtype=DTYPES[kv_dtype], device=self.module.device)
        self.take_pages(num_pages)
        self._takes_rows = "logits_to_keep" in inspect.signature(self.module.forward).parameters

    def take_pages(self, num_pages: int) -> None:
        """Have so many empty pages from here on."""
        self.pages = PagedAttention(self._layers, num_pages, self.page_tokens, self._like)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Floats:
        """Write the batch's keys and values; return the logits of its rows, [rows, vocab_size]."""
        rows = to_tensor(batch.logit_rows, self.module.device)
        if self._takes_rows:
            return to_floats(self._run(self.module, batch, logits_to_keep=rows))
        return to_floats(self._run(self.module, batch)[rows])

    def logits(self, batch: Batch) -> Logits:
        """Do as `forward`."""
        return Logits(self.forward(batch))

    @torch.inference_mode()
    def embed(self, batch: Batch) -> Floats:
        """Do as `forward`, but return what the head would see, [rows, hidden_size]."""
        rows = to_tensor(batch.logit_rows, self.module.device)
        return to_floats(self._run(self.module.base_model, batch)[rows])

    def _run(self, module: nn.Module, batch: Batch, **options: Any) -> Tensor:
        """Run the whole model, or its part without the head."""
        assert batch.rope_positions is None  # no model that runs here has them
        device = self.module.device
        self.pages.places = place(batch, self.page_tokens, device)
        if self._adapters is not None:
            self._adapters.begin_step(batch, cuts_head="logits_to_keep" in options)
        if batch.embed_rows is None:
            options["input_ids"] = to_tensor(batch.token_ids, device)[None]
        else:
            options["inputs_embeds"] = self._inputs(batch)[None]
        with using_attention(self.pages):
            output: Tensor = module(
                position_ids=self.pages.places.positions[None],
                use_cache=False,
                return_dict=False,
                **options,
            )[0][0]
        return output

    def _inputs(self, batch: Batch) -> Tensor:
        """Return what the tokens come in as, rows of images among them, [tokens, hidden_size]."""
        assert batch.embed_rows is not None and batch.embeds is not None
        device = self.module.device
        inputs: Tensor = self.module.get_input_embeddings()(to_tensor(batch.token_ids, device))
        is_row = batch.embed_rows >= 0
        rows = torch.from_numpy(batch.embeds[batch.embed_rows[is_row]])
        inputs[torch.from_numpy(is_row)] = rows.to(inputs)
        return inputs


def to_floats(tensor: Tensor) -> Floats:
    """Return a tensor as an fp32 array."""
    floats: Floats = tensor.float().cpu().numpy()
    return floats
