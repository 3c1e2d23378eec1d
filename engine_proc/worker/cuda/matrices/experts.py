"""The matrices of a mixture's experts, loaded as one matrix, for `expert_linear`."""

from headrace.engine_proc.worker.cuda.matrices.dense import DenseMatrix
from headrace.engine_proc.worker.cuda.matrices.fp8 import Fp8Matrix
from headrace.engine_proc.worker.cuda.matrices.int4 import Int4Matrix
from headrace.engine_proc.worker.cuda.matrices.mxfp4 import GROUP, Mxfp4Matrix
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import ExpertFormat, ExpertWeights


def experts_of(matrix: DenseMatrix | Fp8Matrix | Int4Matrix | Mxfp4Matrix) -> ExpertWeights:
    """Return experts whose matrices, one after the other, are a matrix."""
    match matrix:
        case DenseMatrix(weight, bias):
            return ExpertWeights(weight, bias)
        case Fp8Matrix(codes, scales, size, bias):
            return ExpertWeights(codes, bias, ExpertFormat.FP8, scales, group_size=size)
        case Int4Matrix(codes, zeros, scales, size, _, bias):
            return ExpertWeights(codes, bias, ExpertFormat.INT4, scales, zeros, size)
        case Mxfp4Matrix(codes, exponents, bias):
            return ExpertWeights(codes, bias, ExpertFormat.MXFP4, exponents, group_size=GROUP)
