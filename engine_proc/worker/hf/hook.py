"""Connects transformers' modules to our attention.

Every model that uses transformers' attention interface calls the function registered here, under
the name `HOOKED`, with its queries, keys and values after RoPE. It hands them to the `Attention`
that is in force. No mask is made for a batch. `Probe` reads the reach of each layer once, off the
mask that transformers would have made. A mask that is more than a reach is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from headrace.engine_proc.worker.reference.torch_attention import Reach
from headrace.errors import ModelError

HOOKED = "headrace"  # for batches: attends, and makes no masks
PROBED = "headrace_probe"  # for `Probe`: makes masks that only say which one they are

# (sequence, head, query position, key position) -> whether the query sees the key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """The attention call of one layer. `tokens` are those of all sequences, flattened."""

    module: nn.Module
    query: Tensor  # [tokens, heads, head_dim]
    key: Tensor  # [tokens, kv_heads, head_dim]
    value: Tensor  # [tokens, kv_heads, value_dim]
    mask: Tensor | None
    scale: float
    softcap: float | None
    sinks: Tensor | None  # [heads]


class Attention(Protocol):
    """Answers the calls of one forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return what the tokens see, [tokens, heads, value_dim]."""
        ...


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's heads, and which keys and values its queries see."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    reach: Reach


in_force: ContextVar[Attention] = ContextVar("in_force")


@contextmanager
def using_attention(attention: Attention) -> Iterator[None]:
    """Let `attention` answer the calls of the models that run inside."""
    token = in_force.set(attention)
    try:
        yield
    finally:
        in_force.reset(token)


def hooked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Replace transformers' attention function, [1, heads, tokens, dim] -> [1, tokens, heads, dim].

    `sliding_window` among the others is in the mask already, `dropout` is for training.
    """
    if position_bias is not None:
        raise ModelError("its attention adds a position bias, which is not supported")
    call = AttentionCall(
        module=module,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        mask=attention_mask,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return in_force.get().attend(call)[None], None


def probe_mask(mask_function: MaskFunction, **_others: Any) -> Tensor:
    """Replace transformers' mask function while a `Probe` is active."""
    probe = in_force.get()
    assert isinstance(probe, Probe)
    return probe.mark(mask_function)


AttentionInterface.register(HOOKED, hooked_attention)
AttentionInterface.register(PROBED, hooked_attention)
AttentionMaskInterface.register(PROBED, probe_mask)


class Probe:
    """Learns a model's layers from one forward pass, whose result means nothing."""

    def __init__(self, num_positions: int) -> None:
        self.num_positions = num_positions
        self.layers: dict[nn.Module, AttentionLayer] = {}
        self._masks: list[MaskFunction] = []
        self._reaches: dict[int, Reach] = {}

    def mark(self, mask_function: MaskFunction) -> Tensor:
        """Return a mask that holds nothing but its own number, [1, 1, 1, 1]."""
        self._masks.append(mask_function)
        return torch.full((1, 1, 1, 1), float(len(self._masks) - 1))

    def attend(self, call: AttentionCall) -> Tensor:
        """Note the layer."""
        if call.module in self.layers:
            raise ModelError("several of its layers share one attention, which is not supported")
        kv_heads, head_dim = call.key.shape[1:]
        value_dim = call.value.shape[2]
        self.layers[call.module] = AttentionLayer(
            call.query.shape[1], kv_heads, head_dim, value_dim, self.reach(call.mask)
        )
        return call.query.new_zeros(*call.query.shape[:2], value_dim)

    def reach(self, mask: Tensor | None) -> Reach:
        """Return how far the mask with this mark lets tokens see."""
        number = -1.0 if mask is None or mask.numel() != 1 else float(mask)
        if number not in range(len(self._masks)):
            raise ModelError("its attention has a mask of its own making, which is not supported")
        index = int(number)
        if index not in self._reaches:
            self._reaches[index] = reach_of(self._masks[index], self.num_positions)
        return self._reaches[index]


def reach_of(mask: MaskFunction, num_positions: int) -> Reach:
    """Find how far `mask` reaches to both sides.

    Raises:
        ModelError: it is not the same to both sides of every position; chunks, for instance, or
            blocks that see each other.
    """
    last = num_positions - 1
    keys = torch.arange(num_positions)

    def seen(query: int) -> Tensor:  # [num_positions]
        zero = torch.zeros_like(keys)
        return mask(zero, zero, torch.full_like(keys, query), keys).broadcast_to(keys.shape)

    before = int(seen(last).sum()) - 1
    after = int(seen(0).sum()) - 1
    reach = Reach(None if before == last else before, None if after == last else after)
    around = {0, 1, 2, before, before + 1, 2 * before, last // 3, last // 2, last - 1, last}
    for query in sorted(around & set(range(num_positions))):
        behind = query - keys
        if not torch.equal(seen(query), (behind <= before) & (behind >= -after)):
            raise ModelError(
                f"its attention mask is neither causal, nor full, nor a sliding window: position "
                f"{query} does not see {before} positions before and {after} after it; chunked "
                "attention and the like are not supported"
            )
    return reach


def probe(model: PreTrainedModel, num_positions: int) -> dict[nn.Module, AttentionLayer]:
    """Return the layers of `model` that attend, in order of their calls.

    Args:
        num_positions: how long sequences may get; what a mask does beyond that does not matter.
    """
    watch = Probe(num_positions)
    model.set_attn_implementation(PROBED)
    with torch.inference_mode(), using_attention(watch):
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    model.set_attn_implementation(HOOKED)
    return watch.layers
