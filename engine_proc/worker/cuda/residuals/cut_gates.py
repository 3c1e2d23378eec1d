"""An MLP whose gates are cut: of a token's gates, only what is above a limit is left.

The limit lies so many standard deviations above the mean of the token's gates.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.gated_activation import KINDS, activate
from headrace.engine_proc.worker.cuda.kernels.gated_activation import reference as act_in_torch
from headrace.engine_proc.worker.cuda.kernels.numerics import next_power_of_2, rounded
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation

WHOLE, SUMS, SQUARES, GIVEN = (tl.constexpr(part) for part in range(4))


def cut_gates(
    gate_up: Tensor,
    activation: Activation,
    cut: float,
    num_all: int,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return `act(max(gate - limit, 0)) * up`, computed in fp32 and rounded once.

    Args:
        gate_up: [rows, 2 * numbers], gates first.
        cut: of the limit, in standard deviations above the mean.
        num_all: a row's gates, those of other workers included.
        total: sums over all workers, [rows]; None is that all gates are here.
    Returns:
        [rows, numbers]
    """
    assert gate_up.is_contiguous()
    num_rows, num = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, num)
    if total is None:
        launch(WHOLE, out, gate_up, out, out, activation, cut)
        return out
    sums, squares = gate_up.new_empty(2, num_rows, dtype=torch.float32)
    launch(SUMS, sums, gate_up, sums, sums, activation, cut)
    means = total(sums) / num_all
    launch(SQUARES, squares, gate_up, means, means, activation, cut)
    deviations = (total(squares) / num_all).sqrt()
    launch(GIVEN, out, gate_up, means, deviations, activation, cut)
    return out


def launch(
    part: tl.constexpr,
    out: Tensor,
    gate_up: Tensor,
    means: Tensor,
    deviations: Tensor,
    activation: Activation,
    cut: float,
) -> None:
    """Launch the kernel: all of it, or a part between sums over workers."""
    num_rows, num = gate_up.shape[0], gate_up.shape[1] // 2
    if num_rows:
        cut_gates_kernel[(num_rows,)](
            out,
            gate_up,
            means,
            deviations,
            NUM=num,
            BLOCK=next_power_of_2(num),
            PART=part.value,
            CUT=cut,
            KIND=KINDS.index(activation),
            num_warps=8,
            enable_fp_fusion=False,
        )


@triton.jit
def cut_gates_kernel(
    out: tl.tensor,
    gate_up: tl.tensor,
    means: tl.tensor,
    deviations: tl.tensor,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    CUT: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_number = at < NUM
    place = gate_up + row * (2 * NUM) + at
    gates = tl.load(place, mask=is_number, other=0.0).to(tl.float32)
    if PART == SUMS:
        tl.store(out + row, tl.sum(gates, 0))
        return
    if PART == WHOLE:
        mean = tl.sum(gates, 0) / NUM
        deviation = tl.sqrt(squares_of(gates, is_number, mean) / NUM)
    elif PART == SQUARES:
        tl.store(out + row, squares_of(gates, is_number, tl.load(means + row)))
        return
    else:
        mean, deviation = tl.load(means + row), tl.load(deviations + row)
    left = activate(tl.maximum(gates - (mean + deviation * CUT), 0.0), KIND)
    left *= tl.load(place + NUM, mask=is_number, other=0.0).to(tl.float32)
    tl.store(out + row * NUM + at, rounded(left, out.dtype.element_ty), mask=is_number)


@triton.jit
def squares_of(gates: tl.tensor, is_number: tl.tensor, mean: tl.tensor) -> tl.tensor:
    """Return the sum of the squares of what gates lie off their mean."""
    off = tl.where(is_number, gates - mean, 0.0)
    return tl.sum(off * off, 0)


def reference(gate_up: Tensor, activation: Activation, cut: float) -> Tensor:
    """Do as `cut_gates` where all gates are here, in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    deviation, mean = torch.std_mean(gate, -1, unbiased=False, keepdim=True)
    left = (gate - (mean + deviation * cut)).relu()
    return act_in_torch(torch.cat([left, up], 1), activation).to(gate_up.dtype)
