"""A causal depthwise convolution over a step's tokens, behind the states of their sequences.

A token's sum is of itself and of the tokens before it, the oldest first. These are in the step, or
their numbers are columns of the state: chunks change no bits. The state is fp32, [kernel_size - 1,
channels], the oldest column first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, rounded
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves, load_move
from headrace.engine_proc.worker.cuda.mixers.state_moves import reference as moved

BLOCK_TOKENS = 4
BLOCK = 256  # channels


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    moves: StateMoves,
    *,
    is_gated: bool = False,
) -> Tensor:
    """Return `silu(conv(x))`, or LFM2's `c * conv(b * x)`, summed in fp32 and rounded once.

    Args:
        x: [tokens, channels], rows may lie apart; if gated [tokens, 3 * channels]: b, c and x.
        weight: [kernel_size, channels], fp32, the weight of the oldest token first.
        bias: [channels], fp32
        states: [slots, numbers], fp32, slots may lie apart; the first numbers are of this.
    Returns:
        [tokens, channels]
    """
    kernel_size, num_channels = weight.shape
    assert x.shape[1] == num_channels * (3 if is_gated else 1)
    assert x.stride(1) == states.stride(1) == 1
    assert weight.is_contiguous()
    out = x.new_empty(len(x), num_channels)
    if len(x):
        conv_kernel[(cdiv(len(x), BLOCK_TOKENS), cdiv(num_channels, BLOCK))](
            out,
            x,
            weight,
            weight if bias is None else bias,
            states,
            moves.sequences,
            moves.query_starts,
            moves.slots,
            x.stride(0),
            states.stride(0),
            len(x),
            NUM_CHANNELS=num_channels,
            KERNEL_SIZE=kernel_size,
            HAS_BIAS=bias is not None,
            IS_GATED=is_gated,
            BLOCK_TOKENS=BLOCK_TOKENS,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def conv_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    sequences: tl.tensor,
    query_starts: tl.tensor,
    slots: tl.tensor,
    x_stride: tl.tensor,
    state_stride: tl.tensor,
    num_tokens: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    KERNEL_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token, is_channel = token < num_tokens, (channel < NUM_CHANNELS)[None, :]
    sequence = tl.load(sequences + token, mask=is_token, other=0)
    first = tl.load(query_starts + sequence)
    read, written, state_end = load_move(slots, sequence)
    is_last = is_token & (token + 1 == state_end) & (written >= 0)
    before = states + (read * state_stride)[:, None] + channel[None, :]
    behind = states + (written * state_stride)[:, None] + channel[None, :]
    sums = tl.zeros([BLOCK_TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(KERNEL_SIZE):
        source = token - (KERNEL_SIZE - 1 - tap)
        is_here = (is_token & (source >= first))[:, None] & is_channel
        place = x + source.to(tl.int64)[:, None] * x_stride + channel[None, :]
        if IS_GATED:
            gate = tl.load(place, mask=is_here, other=0.0).to(tl.float32)
            number = tl.load(place + 2 * NUM_CHANNELS, mask=is_here, other=0.0)
            number = number.to(tl.float32) * gate
        else:
            number = tl.load(place, mask=is_here, other=0.0).to(tl.float32)
        column = KERNEL_SIZE - 1 - (first - source)
        is_before = (is_token & (source < first) & (read >= 0))[:, None] & is_channel
        stored = tl.load(before + column[:, None] * NUM_CHANNELS, mask=is_before, other=0.0)
        number = tl.where(is_here, number, stored)
        factor = tl.load(
            weight + tap * NUM_CHANNELS + channel, mask=channel < NUM_CHANNELS, other=0.0
        )
        sums += number * factor[None, :]
        if tap > 0:
            column_behind = behind + (tap - 1) * NUM_CHANNELS
            tl.store(column_behind, number, mask=is_last[:, None] & is_channel)
    if HAS_BIAS:
        sums += tl.load(bias + channel, mask=channel < NUM_CHANNELS, other=0.0)[None, :]
    at = token.to(tl.int64)[:, None]
    is_number = is_token[:, None] & is_channel
    if IS_GATED:
        place = x + at * x_stride + NUM_CHANNELS + channel[None, :]
        sums *= tl.load(place, mask=is_number, other=0.0).to(tl.float32)
    else:
        sums = sums / (1.0 + tl.exp(-sums))
    place = out + at * NUM_CHANNELS + channel[None, :]
    tl.store(place, rounded(sums, out.dtype.element_ty), mask=is_number)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    moves: StateMoves,
    *,
    is_gated: bool = False,
) -> Tensor:
    """Do as `causal_conv`, in plain torch."""
    kernel_size, num_channels = weight.shape
    numbers, factor = x.float(), None
    if is_gated:
        b, factor, numbers = numbers.chunk(3, -1)
        numbers = b * numbers
    out = x.new_zeros(len(x), num_channels)

    def run(rows: slice, before: Tensor) -> Tensor:
        seen = torch.cat([before.view(-1, num_channels), numbers[rows]])
        sums = F.conv1d(seen.T[None], weight.T[:, None], bias, groups=num_channels)[0].T
        convolved = F.silu(sums) if factor is None else factor[rows] * sums
        out[rows] = convolved.to(x.dtype)
        return seen[-(kernel_size - 1) :].flatten()

    moved(states[:, : (kernel_size - 1) * num_channels], moves, run)
    return out
