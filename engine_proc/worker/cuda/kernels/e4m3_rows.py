"""Rounds rows to 8-bit floats (e4m3), each group of a row by a scale of its own."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, next_power_of_2, rounded

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST = 1e-10  # a row of nothing but smaller numbers is as if they were this large
LARGEST_CODE, SMALLEST_MAXIMUM = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)


def rounded_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round groups of a row to e4m3, the largest number of each to 448 or -448.

    Returns:
        codes, [rows, terms], and fp32 scales, [rows, groups]
    """
    num_rows, num_terms = x.shape
    num_groups = cdiv(num_terms, group_size)
    assert x.stride(1) == 1
    codes = torch.empty(num_rows, num_terms, device=x.device, dtype=E4M3)
    scales = torch.empty(num_rows, num_groups, device=x.device, dtype=torch.float32)
    if num_rows:
        round_kernel[(num_rows, num_groups)](
            codes,
            scales,
            x,
            x.stride(0),
            NUM_TERMS=num_terms,
            GROUP=group_size,
            BLOCK=min(1024, next_power_of_2(group_size)),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return codes, scales


@triton.jit
def round_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    x_stride: tl.tensor,
    NUM_TERMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = group * GROUP
    end = tl.minimum(begin + GROUP, NUM_TERMS)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(begin, end, BLOCK):
        term = first + tl.arange(0, BLOCK)
        numbers = tl.load(x + row * x_stride + term, mask=term < end, other=0.0)
        largest = tl.maximum(largest, tl.abs(numbers.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0), SMALLEST_MAXIMUM) / LARGEST_CODE
    tl.store(scales + row * tl.num_programs(1) + group, scale)
    for first in range(begin, end, BLOCK):
        term = first + tl.arange(0, BLOCK)
        numbers = tl.load(x + row * x_stride + term, mask=term < end, other=0.0)
        code = rounded(numbers.to(tl.float32) / scale, codes.dtype.element_ty)
        tl.store(codes + row * NUM_TERMS + term, code, mask=term < end)


def rounded_reference(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Do as `rounded_rows`, in plain torch."""
    num_rows, num_terms = x.shape
    padded = F.pad(x.float(), (0, -num_terms % group_size)).view(num_rows, -1, group_size)
    scales = padded.abs().amax(2).clamp(min=SMALLEST) / LARGEST
    codes = (padded / scales[:, :, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return codes.view(num_rows, -1)[:, :num_terms].contiguous(), scales
