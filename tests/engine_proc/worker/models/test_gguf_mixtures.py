"""Each architecture of GGUF files with experts executes as its family does in transformers."""

from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_mixtures import ARCHITECTURES, BUILT_IN
from gguf_twins import write_gguf
from mixture_models import LONGROPE, check, reference, tiny_mixture

from headrace.engine_proc.worker.models.gguf_architectures import MIXTURES
from headrace.engine_proc.worker.models.model import open_model
from headrace.errors import ModelError

HYBRIDS = {"lfm2moe", "qwen3next", "qwen35moe"}  # of test_hybrid_families.py
CASES: dict[str, dict[str, Any]] = {  # beside what llama.cpp has built in
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "gpt_oss": {},
    "ernie4_5_moe": {},
    "glm4_moe": {},
    "glm4_moe without groups": {},
    "dots1": {},
    "hunyuan_v1_moe": {},
    "llama4_text": {},
    "minimax_m2": {},
    "minimax_m2 rotated in part": {},
    "llama4_text of Maverick's kind": {},
    "phimoe": {},
    "phimoe with LongRoPE": {"router_jitter_noise": 0.01, "sliding_window": None}
    | {"rope_parameters": LONGROPE | {"short_mscale": (1 + log(8) / log(32)) ** 0.5}},
}


@pytest.mark.parametrize("case", CASES)
def test_files_with_experts_execute_as_in_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_mixture(case, **BUILT_IN.get(case.split()[0], {}) | CASES[case])
    check(write_gguf(tmp_path / "tiny.gguf", model), reference(model))


def test_every_architecture_with_experts_has_a_case() -> None:
    families = {case.split()[0] for case in CASES}
    tested = {ARCHITECTURES.get(family, family) for family in families}
    hybrids = {"lfm2moe", "qwen3next", "qwen35moe"}  # of test_hybrid_families.py
    hybrids |= {"granitehybrid", "kimi-linear", "nemotron_h_moe"}
    hybrids |= {"gemma4"}  # of test_gemma_families.py
    assert tested | hybrids | {"deepseek2", "jamba"} == set(MIXTURES)  # of test_latent_families.py


def test_gate_and_up_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    model = tiny_mixture("qwen3_moe")
    path = write_gguf(tmp_path / "tiny.gguf", model, fuse_experts=True)
    check(path, reference(model))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = tiny_mixture("glm4_moe")
    further = {
        "blk.3.nextn.eh_proj.weight": np.ones((64, 128), np.float32),
        "blk.3.attn_norm.weight": np.ones(64, np.float32),
    }
    keys = {"block_count": 4, "nextn_predict_layers": 1}
    path = write_gguf(tmp_path / "tiny.gguf", model, extra=further, keys=keys)
    check(path, reference(model))


def test_gpt_oss_without_scaling_has_no_yarn(tmp_path: Path) -> None:
    model = tiny_mixture("gpt_oss", **BUILT_IN["gpt_oss"], rope_parameters={"rope_type": "default"})
    check(write_gguf(tmp_path / "tiny.gguf", model), reference(model))


STACK = "blk.1.ffn_up_exps.weight"


@pytest.mark.parametrize(
    ("case", "keys", "complaint"),
    [
        ("mixtral", {"expert_count": 1 << 31}, "'expert_count': 2147483648, not at most 4096"),
        ("mixtral", {"expert_count": "many"}, "'expert_count': 'many', not a positive integer"),
        ("mixtral", {"expert_count": 6}, r"'blk.0.ffn_gate_inp.weight' has shape \[5, 64\]"),
        ("mixtral", {"expert_used_count": 6}, "'expert_used_count': 6, not at most the number"),
        ("mixtral", {"expert_used_count": 0}, "lacks 'expert_used_count'"),
        ("mixtral", {"expert_count": 0}, "'expert_used_count': 2, which is not supported"),
        ("qwen3_moe", {"expert_feed_forward_length": 33}, r"'blk.0.ffn_gate_exps.weight\[0\]' has"),
        ("qwen3_moe", {"expert_gating_func": 2}, "'expert_gating_func': 2, not 1"),
        ("qwen3_moe", {"expert_weights_scale": 2.0}, "'expert_weights_scale': 2.0, which is not"),
        ("glm4_moe", {"expert_group_count": 3}, "'expert_group_count': 3, not groups of 2 or more"),
        ("glm4_moe", {"expert_group_used_count": 9}, "'expert_group_used_count': 9, not as many"),
        ("glm4_moe", {"nextn_predict_layers": 3}, "'nextn_predict_layers': 3, not a number of the"),
        (
            "llama4_text",
            {"attention.sliding_window": 0},
            "'attention.sliding_window': 0, not absen",
        ),
        ("glm4_moe", {"leading_dense_block_count": 2}, "'blk.1.ffn_up.weight' is missing"),
    ],
)
def test_keys_of_experts_that_do_not_fit_are_named(
    case: str, keys: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_mixture(case), keys=keys)
    with pytest.raises(ModelError, match=complaint) as refused:
        open_model(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ((4, 80, 64), r"'blk.1.ffn_up_exps.weight\[4\]' is missing"),
        ((6, 80, 64), r"'blk.1.ffn_up_exps.weight\[5\]' is not part of"),
        ((5, 64, 80), r"weight\[0\]' has shape \[64, 80\], but a llama model .* has \[80, 64\]"),
        ((400, 64), r"'blk.1.ffn_up_exps.weight\[0\]' is missing"),
    ],
)
def test_stacks_of_experts_that_do_not_fit_are_named(
    shape: tuple[int, ...], complaint: str, tmp_path: Path
) -> None:
    extra = {STACK: np.ones(shape, np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_mixture("mixtral"), extra=extra)
    with pytest.raises(ModelError, match=complaint):
        open_model(path)


def test_experts_of_other_architectures_are_refused(tmp_path: Path) -> None:
    model = tiny_mixture("mixtral")
    path = write_gguf(tmp_path / "tiny.gguf", model, architecture="arctic")
    with pytest.raises(ModelError, match="architecture 'arctic' with experts is not supported in"):
        open_model(path)
