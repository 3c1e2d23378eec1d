"""What multiplies an encoder's layers follows the flags, the machine and what is stored."""

from typing import Any

import pytest
from embedding_models import minilm
from engine_configs import execution_config

from headrace.engine_proc.worker import encoder_arithmetic
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.encoder_arithmetic import (
    TILES,
    EncoderArithmetic,
    arithmetic_of,
    suited,
)
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype
from headrace.engine_proc.worker.models.model import open_model

F32, BF16, Q8_0 = {Format.F32}, {Format.BF16}, {Format.Q8_0}
FIXED16, BFLOAT16, PACKED = WeightDtype.FIXED16, WeightDtype.BFLOAT16, WeightDtype.PACKED


@pytest.mark.parametrize(
    ("formats", "scores", "kernels", "has_fast_fixed16", "expected"),
    [
        (F32, False, "avx512", True, FIXED16),
        (F32, True, "avx512", True, FIXED16),
        (F32, False, "avx2", False, PACKED),
        (F32, False, TILES, True, BFLOAT16),
        (F32, True, TILES, True, FIXED16),
        (BF16, False, TILES, False, BFLOAT16),
        (BF16, True, TILES, False, PACKED),
        (F32 | Q8_0, False, TILES, False, PACKED),
    ],
)
def test_tiles_take_vectors_in_bf16_and_others_16_bits(
    formats: set[Format],
    scores: bool,
    kernels: str,
    has_fast_fixed16: bool,
    expected: WeightDtype,
) -> None:
    assert suited(formats, scores, kernels, has_fast_fixed16) is expected


@pytest.mark.parametrize(
    ("kernels", "is_fast", "flags", "of_flags", "expected", "name"),
    [
        ("avx512", True, {}, PACKED, (FIXED16, True), "16-bit integers (fixed16)"),
        (TILES, True, {}, PACKED, (BFLOAT16, False), "bfloat16"),
        ("avx2", False, {}, PACKED, (PACKED, True), "float32"),
        (TILES, True, {"dtype": "float32"}, PACKED, (PACKED, True), "float32"),
        ("avx512", True, {"dtype": "bfloat16"}, BFLOAT16, (BFLOAT16, False), "bfloat16"),
    ],
)
def test_flags_go_before_the_machine(
    kernels: str,
    is_fast: bool,
    flags: dict[str, Any],
    of_flags: WeightDtype,
    expected: tuple[WeightDtype, bool],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder_arithmetic, "best_kernels", lambda: kernels)
    monkeypatch.setattr(encoder_arithmetic, "prefers_fixed16", lambda formats: is_fast)
    chosen = arithmetic_of(execution_config(minilm(), **flags), of_flags, open_model(minilm()))
    assert chosen == EncoderArithmetic(*expected)
    assert chosen.name == name
