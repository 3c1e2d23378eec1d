"""Adapters (LoRA) of transformers' modules: hooks add low-rank products to layers' outputs.

Rows are grouped by adapter, in their order. A row reads nothing of other rows.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.engine_proc.worker.adapters.expert_factors import NO_STACKS
from headrace.engine_proc.worker.adapters.factors import AdapterRefused, Factors
from headrace.engine_proc.worker.adapters.peft_folder import read_peft
from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.hf.hook import probe
from headrace.engine_proc.worker.hf.model import TransformersModel

EXPERT = re.compile(r"experts\.\d+\.")  # gets the rows of some tokens
PROBED_TOKENS = 2


@dataclass(frozen=True)
class LayerFactors:
    """What an adapter makes of a layer's output: gain * (W x + b (a x)) + bias."""

    a: Tensor | None  # [rank, in]; None is the identity
    b: Tensor  # [out, rank], scaled; of an embedding [tokens, rank]
    gain: Tensor | None = None  # [out], of DoRA; None is 1

    def of_inputs(self, x: Tensor) -> Tensor:
        """Return what is added for rows of a linear layer's input, [rows, out]."""
        x = x.to(self.b.dtype)
        return (x if self.a is None else x @ self.a.T) @ self.b.T

    def of_tokens(self, ids: Tensor) -> Tensor:
        """Return what is added to the embeddings of tokens, [tokens, hidden]."""
        return self.b[ids] if self.a is None else self.b[ids] @ self.a


LayersFactors = Mapping[nn.Module, LayerFactors]


class AdaptedLayers:
    """The layers of a model that adapters may change, and the adapters by slot.

    Args:
        max_rank: a higher one is refused.
        dtype: of factors; None is that of each layer's weight.
    """

    def __init__(self, model: TransformersModel, max_rank: int, dtype: torch.dtype | None) -> None:
        self._layers = token_layers(model.module)
        self._prefix = f"{model.module.base_model_prefix}."  # that a model without its head lacks
        module: Any = model.module
        self._head: nn.Module | None = module.get_output_embeddings()
        self._whole = (module.get_input_embeddings(), self._head)  # may come in the base's place
        self._max_rank = max_rank
        self._dtype = dtype
        self._slots: dict[int, LayersFactors] = {}
        self._runs: list[tuple[int, Tensor]] = []  # of tokens: slots, and the rows of each
        self._head_runs: list[tuple[int, Tensor]] = []
        for layer in self._layers.values():
            layer.register_forward_hook(self._add)

    def bytes_of(self, rank: int) -> int:
        """Return what an adapter of a rank, with gains, takes for all layers.

        An embedding and a head that come whole take more, which does not count.
        """
        total = 0
        for layer in self._layers.values():
            rows, cols = layer.weight.shape
            total += (rank * (rows + cols) + rows) * (self._dtype or layer.weight.dtype).itemsize
        return total

    def pack(self, path: Path) -> LayersFactors:
        """Read an adapter.

        Raises:
            AdapterRefused: it is broken, does not fit the model, or cannot be expressed.
        """
        if path.suffix == ".gguf":
            raise AdapterRefused(f"{path}: is for GGUF models; this model is a folder")
        factors = read_peft(path, NO_STACKS)
        if not factors:
            raise AdapterRefused(f"{path}: has no tensors")
        try:
            return dict(self._fitted(name, own) for name, own in factors.items())
        except AdapterRefused as error:
            raise AdapterRefused(f"{path}: {error}") from None

    def install(self, slot: int, packed: LayersFactors) -> None:
        """Put an adapter into a slot, in place of the one before."""
        self._slots[slot] = packed

    def begin_step(self, batch: Batch, cuts_head: bool) -> None:
        """Change the layers for the tokens of a batch, from now on.

        Args:
            cuts_head: the head gets the rows with logits only.
        """
        self._runs = self._head_runs = []
        if batch.adapters is not None:
            slots = batch.adapters[batch.sequences]
            self._runs = runs_of(slots)
            self._head_runs = runs_of(slots[batch.logit_rows]) if cuts_head else self._runs

    def _fitted(self, tensor: str, factors: Factors) -> tuple[nn.Module, LayerFactors]:
        """Return the layer that factors are for, and what they are for it."""
        name = tensor.removesuffix(".weight")
        layer = self._layers.get(name) or self._layers.get(name.removeprefix(self._prefix))
        if layer is None:
            raise AdapterRefused(
                f"{name} is no linear layer or embedding of this model that gets a row for each "
                "token; merge the adapter into the weights"
            )
        wanted, dtype = tuple(layer.weight.shape), self._dtype or layer.weight.dtype
        base = layer.weight.detach()
        if factors.a is None:
            if layer not in self._whole:
                raise AdapterRefused(
                    f"modules_to_save has {name}; only the embedding and the head can be whole; "
                    "merge the adapter into the weights"
                )
            if factors.b.shape != wanted:
                raise AdapterRefused(misfit(name, factors.b.shape, wanted))
            b = to_tensor(factors.b, torch.float32) - base.float()
            return layer, LayerFactors(None, b.to(dtype))
        given = (*factors.b.shape[:1], *factors.a.shape[1:])
        rank = factors.a.shape[0]
        if given != wanted or factors.b.shape[1:] != (rank,):
            raise AdapterRefused(misfit(name, given, wanted))
        if not 0 < rank <= self._max_rank:
            raise AdapterRefused(f"{name} has rank {rank}; --max-lora-rank is {self._max_rank}")
        a, b = to_tensor(factors.a, torch.float32), to_tensor(factors.b, torch.float32)
        b *= factors.scale
        gain = None
        if (magnitude := factors.magnitude) is not None:
            if magnitude.shape != wanted[:1] or isinstance(layer, nn.Embedding):
                raise AdapterRefused(f"{name} has a magnitude of shape {list(magnitude.shape)}")
            norms = torch.linalg.norm(base.float() + b @ a, dim=1)
            gain = (to_tensor(magnitude, torch.float32) / norms).to(dtype)
        return layer, LayerFactors(a.to(dtype), b.to(dtype), gain)

    def _add(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Forward hook: add what the adapters of rows add."""
        rows_out = output.view(-1, output.shape[-1])
        is_embedding = isinstance(layer, nn.Embedding)
        x = inputs[0].flatten() if is_embedding else inputs[0].reshape(-1, inputs[0].shape[-1])
        for slot, rows in self._head_runs if layer is self._head else self._runs:
            own = self._slots[slot].get(layer)
            if own is None:
                continue
            base = rows_out[rows]
            added = own.of_tokens(x[rows]) if is_embedding else own.of_inputs(x[rows])
            if own.gain is None:
                rows_out[rows] = (base + added).to(output.dtype)
                continue
            bias = 0.0 if layer.bias is None else layer.bias
            rows_out[rows] = ((base - bias + added) * own.gain + bias).to(output.dtype)
        return output


def token_layers(module: PreTrainedModel) -> dict[str, Any]:
    """Return the linear layers and embeddings that get a row for each token, by name."""
    calls: dict[nn.Module, list[int]] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.setdefault(layer, []).append(output.numel() // output.shape[-1])

    found = {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) in (nn.Linear, nn.Embedding) and not EXPERT.search(name)
    }
    hooks = [layer.register_forward_hook(note) for layer in found.values()]
    probe(module, PROBED_TOKENS)
    for hook in hooks:
        hook.remove()
    return {name: layer for name, layer in found.items() if calls.get(layer) == [PROBED_TOKENS]}


def runs_of(slots: "np.typing.NDArray[np.int32]") -> list[tuple[int, Tensor]]:
    """Return the slots of rows' adapters, and the rows of each. Rows of -1 have none."""
    return [
        (int(slot), torch.from_numpy(np.flatnonzero(slots == slot)))
        for slot in np.unique(slots[slots >= 0])
    ]


def misfit(name: str, given: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Return what is wrong with factors of a shape."""
    return f"{name} is {list(given)} in the adapter, and {list(wanted)} in the model"


def to_tensor(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return factors as torch has them."""
    return torch.from_numpy(np.ascontiguousarray(weight.to_float32())).to(dtype).clone()
