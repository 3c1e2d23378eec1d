"""Leaves of transformers' modules what one of several workers has, by the plan of their class.

A plan says of a layer whether its rows or its columns are cut. Outputs of columns are summed over
the workers, by hooks; so are those of experts, of each of which every worker has a part. Heads go
by KV head, as in `shard.py`. Weights outside the plan are on every worker, and so are embeddings.
These are read by token, and often are the head's weights, too.

That a model is still itself when it is cut is for `check.py` to see.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.hf.hook import AttentionLayer, probe
from headrace.engine_proc.worker.hf.model import TransformersModel
from headrace.engine_proc.worker.parallel.shard import INNER_UNIT, cut, cut_heads
from headrace.errors import ModelError

REPLICATED_STYLES = frozenset(
    {
        "embedding_rowwise",
        "mla_kv_a_proj",
        "replicate",
        "replicated_with_grad_allreduce",  # a norm of each head
    }
)
CUT_LAYERS = frozenset({"colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"})


def take_share(
    model: TransformersModel, group: ShmAllReduce, max_model_len: int
) -> TransformersModel:
    """Cut a model in place, and let its modules meet the other workers'. All have to do it.

    Raises:
        ModelError: its class has no plan, or one that says what we cannot do.
    """
    plan = model.module.tp_plan or {}
    if not plan:
        raise ModelError(
            f"{model.architecture} has no plan for tensor parallelism in transformers; use --tp 1"
        )
    sharder = ModuleSharder(group, model.layers)
    for name, module in list(model.module.named_modules()):
        style = plan.get(starred(name))
        if style == "moe_tp_experts":
            module.register_forward_hook(partial(summed, group))
        elif style in CUT_LAYERS:
            sharder.cut_layer(style, name, module, model.module)
        elif style is not None and style not in REPLICATED_STYLES:
            raise unknown(name, style)
    for name, parameter in list(model.module.named_parameters()):
        style = plan.get(starred(name))
        if style is not None:
            sharder.cut_experts(style, name, parameter)
    return TransformersModel(model.module, probe(model.module, max_model_len), model.pooling)


def starred(name: str) -> str:
    """Return a module's name as plans have it: `layers.3.mlp` is `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def unknown(name: str, style: str) -> ModelError:
    """The error for a plan that we cannot follow."""
    return ModelError(f"its plan for tensor parallelism has {name} as {style!r}; use --tp 1")


class ModuleSharder:
    """Cuts layers, for one worker."""

    def __init__(self, group: ShmAllReduce, layers: Mapping[nn.Module, AttentionLayer]) -> None:
        self._group = group
        self._layers = layers

    def cut_layer(self, style: str, name: str, linear: nn.Module, module: nn.Module) -> None:
        """Leave this worker's part of a linear layer."""
        if not isinstance(linear, nn.Linear):
            raise unknown(name, style)
        parent, _, local = name.rpartition(".")
        attention = self._layers.get(module.get_submodule(parent))
        is_by_rows = style.startswith("colwise")  # of x . W^T
        count = linear.out_features if is_by_rows else linear.in_features
        if attention is None or style in ("colwise_gather_output", "rowwise_split_input"):
            shares = self._even(name, count)
        else:
            shares = self._by_head(name, count, attention, of_keys=local[0] in "kv")
        own = shares[self._group.rank]
        with torch.no_grad():
            if is_by_rows:
                linear.weight = parameter_of(linear.weight[own.start : own.stop])
                if linear.bias is not None:
                    linear.bias = parameter_of(linear.bias[own.start : own.stop])
                linear.out_features = len(own)
            else:
                linear.weight = parameter_of(linear.weight[:, own.start : own.stop])
                if self._group.rank > 0:  # one worker adds it to the sum
                    linear.register_parameter("bias", None)
                linear.in_features = len(own)
        if style == "colwise_gather_output":
            linear.register_forward_hook(partial(gathered, self._group, shares))
        elif style == "rowwise_split_input":
            linear.register_forward_pre_hook(partial(split, own))
        if not is_by_rows:
            linear.register_forward_hook(partial(summed, self._group))

    def cut_experts(self, style: str, name: str, parameter: nn.Parameter) -> None:
        """Leave a part of each expert: [experts, 2 * inner, hidden] or [experts, hidden, inner]."""
        if style not in ("packed_colwise", "rowwise") or parameter.dim() != 3:
            raise unknown(name, style)
        halves = 2 if style == "packed_colwise" else 1
        axis = 1 if style == "packed_colwise" else 2
        own = self._even(name, parameter.shape[axis] // halves)[self._group.rank]
        parts = [
            half.narrow(axis, own.start, len(own)) for half in parameter.data.chunk(halves, axis)
        ]
        parameter.data = torch.cat(parts, axis).contiguous()

    def _even(self, name: str, count: int) -> list[range]:
        num_ranks = self._group.num_ranks
        if count < num_ranks:
            raise ModelError(f"{name} has {count} rows or columns, too few for --tp {num_ranks}")
        return cut(count, num_ranks, INNER_UNIT if count >= INNER_UNIT * num_ranks else 1)

    def _by_head(self, name: str, count: int, layer: AttentionLayer, of_keys: bool) -> list[range]:
        num_ranks = self._group.num_ranks
        if num_ranks > layer.heads:
            raise ModelError(f"{name} has {layer.heads} heads, too few for --tp {num_ranks}")
        num_heads = layer.kv_heads if of_keys else layer.heads
        if count % num_heads:
            raise ModelError(f"{name}: {count} is no multiple of {num_heads} heads; use --tp 1")
        width = count // num_heads
        pairs = cut_heads(layer.heads, layer.kv_heads, num_ranks)
        heads = [keys if of_keys else queries for queries, keys in pairs]
        return [range(own.start * width, own.stop * width) for own in heads]


def parameter_of(part: Tensor) -> nn.Parameter:
    """Return a part of a weight, of which the rest can go."""
    return nn.Parameter(part.clone(), requires_grad=False)


def summed(group: ShmAllReduce, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Return a forward hook that sums outputs over the workers."""
    output = output.contiguous()
    group.all_reduce(output)
    return output


def gathered(
    group: ShmAllReduce,
    shares: Sequence[range],
    _module: nn.Module,
    _inputs: Any,
    output: Tensor,
) -> Tensor:
    """Return a forward hook that gathers the outputs of all workers, [..., own] -> [..., all]."""
    width = max(len(share) for share in shares)
    padded = F.pad(output, (0, width - output.shape[-1])).contiguous()
    parts = padded.new_empty(group.num_ranks, *padded.shape)
    group.all_gather(padded, parts)
    return torch.cat([part[..., : len(s)] for part, s in zip(parts, shares, strict=True)], dim=-1)


def split(own: range, _module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Forward pre-hook: cut this worker's part out of an input that all workers have."""
    return inputs[0][..., own.start : own.stop]
