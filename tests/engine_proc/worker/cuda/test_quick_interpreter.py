"""The interpreter that runs kernels for tests has the bits of Triton's own."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from mutants.quick_interpreter import own_interpreter
from random_decoders import FEW, MIXTURES, NUM_PAGES, batch, random_weights
from triton.language.semantic import TritonSemantic

from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor

SPEC = dataclasses.replace(MIXTURES["gpt_oss"], **FEW, layers=MIXTURES["gpt_oss"].layers[:1])


def step() -> np.ndarray[Any, Any]:
    executor = CudaExecutor(
        SPEC,
        random_weights(SPEC),
        num_pages=NUM_PAGES,
        page_tokens=16,
        device="cpu",
        dtype=torch.bfloat16,
        tiling=Tiling(rows=16, keys=16, split_keys=16, enough_programs=6),
    )
    return executor.forward(batch([(0, 0, 5), (1, 0, 2)]))


def test_a_step_has_the_bits_of_triton_s_interpreter(quickly_interpreted: Any) -> None:
    if quickly_interpreted is None:
        pytest.skip("a GPU runs kernels")
    quick, quick_check = step(), TritonSemantic.binary_op_type_checking_impl
    with own_interpreter(quickly_interpreted):
        assert TritonSemantic.binary_op_type_checking_impl is not quick_check
        np.testing.assert_array_equal(quick, step())
    assert TritonSemantic.binary_op_type_checking_impl is quick_check
