"""A matrix of 4-bit floats (e2m1), 32 of which share an exponent: gpt-oss's experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.engine_proc.worker.checkpoints.int4_packings import Codes
from headrace.engine_proc.worker.checkpoints.weights import Format, Weight
from headrace.engine_proc.worker.cuda.matrices.int4 import paired
from headrace.engine_proc.worker.cuda.matrices.upload import send

GROUP = 32  # terms under an exponent
BLOCK_BYTES = 17  # of a file's block: the exponent, then codes 0 to 15 in the lower bits


@dataclass(frozen=True)
class Mxfp4Matrix:
    """The numbers of a matrix, which only `expert_linear` multiplies with."""

    codes: Tensor  # [columns, terms / 2], uint8, of two adjacent terms the first in the lower bits
    exponents: Tensor  # [columns, terms / 32], uint8, each 127 more than that of the power of two
    bias: Tensor | None = None  # [columns]

    @classmethod
    def of(
        cls, parts: Sequence[Weight], bias: Tensor | None, device: torch.device
    ) -> "Mxfp4Matrix | None":
        """Load a matrix that is stored in this format; None if it is not."""
        if any(part.format != Format.MXFP4 for part in parts):
            return None
        stored = send(parts, blocks_of, device, torch.uint8)
        codes, exponents = stored[:, :, 1:].flatten(1), stored[:, :, 0]
        return cls(codes.contiguous(), exponents.contiguous(), bias)


def blocks_of(piece: Weight) -> Codes:
    """Return blocks, [rows, groups, 17], with adjacent codes in a byte."""
    num_rows, num_terms = piece.shape
    blocks = piece.stored().data.reshape(num_rows * (num_terms // GROUP), BLOCK_BYTES)
    codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], 1)
    own = np.concatenate([blocks[:, :1], paired(codes)], 1)
    return own.reshape(num_rows, -1, BLOCK_BYTES)
