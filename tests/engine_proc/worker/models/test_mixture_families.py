"""Every family of mixtures, lowered, gives the logits of transformers.

The models are random and tiny, but odd: some layers are dense, experts are few, windows short.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixture_models import (
    EXECUTORS,
    GREEDY_PROMPTS,
    LONGROPE,
    MIXTURES,
    NUM_TOKENS,
    all_ways,
    check,
    greedy_together,
    reference,
    tiny_mixture,
)
from quantized_folders import Int4, awq, compressed, gptq, random_int4
from reference import endless_answers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.models.families import mixtures
from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor
from headrace.errors import ModelError


@pytest.mark.parametrize("case", MIXTURES)
def test_logits_of_mixtures_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_mixture(case)
    model.save_pretrained(tmp_path)
    check(tmp_path, reference(model))


@pytest.mark.parametrize(
    "case",
    [
        "qwen3_moe",
        "gpt_oss",
        "olmoe with clipped queries",
        "ernie4_5_moe with biases",
        "flex_olmo",
        "granitemoe_swa",
        "hunyuan_v1_moe",
        "phimoe",
    ],
)
def test_greedy_text_of_mixtures_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    """Whole, in chunks, and computed again in the middle of a text."""
    model = tiny_mixture(case)
    model.save_pretrained(tmp_path)
    expected = endless_answers(model, GREEDY_PROMPTS, NUM_TOKENS)
    ours = open_model(tmp_path)
    for chunk, preempted_at in ((100, -1), (7, 12)):
        executor = EXECUTORS["core"](ours.spec, ours.weights, num_pages=12)
        assert greedy_together(executor, chunk, preempted_at) == expected


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "granitemoe", "ernie4_5_moe"])
def test_stacked_experts_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_mixture(case)
    model.save_pretrained(tmp_path, save_original_format=False)
    check(tmp_path, reference(model))


def test_every_family_of_mixtures_has_a_case() -> None:
    of_images = {"glm4v_moe_text", "qwen3_vl_moe_text"}  # test_images.py has these
    assert {case.split()[0] for case in MIXTURES} == set(mixtures.MIXTURES) - of_images


def with_settings(folder: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Path:
    """Replace the tensors of a folder, and say how they are quantized."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_mxfp4_of_gpt_oss_executes_as_stored(tmp_path: Path) -> None:
    model = tiny_mixture("gpt_oss", intermediate_size=96)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_columns, num_rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, num_rows, num_columns // 32, 16)).byte()
        scales = torch.randint(122, 126, blocks.shape[:3]).byte()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data = decoded.contiguous()
    with_settings(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]})
    weights = open_model(tmp_path).weights
    assert weights["layers.0.experts.2.up"].stored().format == Format.MXFP4
    part = weights["layers.0.experts.2.down"].columns(32, 96).rows(3, 9)
    whole = weights["layers.0.experts.2.down"].to_float32()
    np.testing.assert_array_equal(part.to_float32(), whole[3:9, 32:96])
    check(tmp_path, reference(model))


def test_parts_of_mxfp4_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tiny_mixture("gpt_oss", intermediate_size=96).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_blocks"] = torch.zeros(5, 64, 3, 16, dtype=torch.uint8)
    with_settings(tmp_path, tensors, {"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match=r"down_proj_scales' is missing; .*_blocks' needs it"):
        open_model(tmp_path)
    tensors[f"{name}_scales"] = torch.zeros(5, 64, 2, dtype=torch.uint8)
    with_settings(tmp_path, tensors, {"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match=r"has shape \[5, 64, 3, 16\], not \[5, 64, 2, 16\]"):
        open_model(tmp_path)


def fp8(codes: Tensor, scale: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def quantized(packed: Callable[[Int4], dict[str, Tensor]] | None, shape: tuple[int, int]) -> Any:
    """Return the tensors of a random matrix, and what it decodes to."""
    if packed is None:
        return fp8((torch.randn(shape) * 40).to(torch.float8_e4m3fn), torch.tensor([0.002]))
    matrix = random_int4(shape, 32, sym=True)
    return packed(matrix), matrix.decoded()


@pytest.mark.parametrize(
    ("settings", "packed"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq),
        ({"quant_method": "compressed-tensors"}, compressed),
        ({"quant_method": "fp8"}, None),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else "",
)
def test_quantized_experts_execute_as_what_they_decode_to(
    settings: dict[str, Any], packed: Any, tmp_path: Path
) -> None:
    model = tiny_mixture("qwen3_moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = model.state_dict()
    for name in [name for name in tensors if ".experts." in name]:
        parts, decoded = quantized(packed, tuple(tensors.pop(name).shape))
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        experts, expert, which = module.rsplit(".", 2)
        size = model.config.moe_intermediate_size
        rows = {"gate_proj": slice(size), "up_proj": slice(size, None), "down_proj": slice(None)}
        stack = "down_proj" if which == "down_proj" else "gate_up_proj"
        plain[f"{experts}.{stack}"][int(expert), rows[which]] = decoded
    model.load_state_dict(plain)
    check(with_settings(tmp_path, tensors, settings), reference(model))


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "dots1"])
def test_dummy_weights_are_made_for_mixtures(case: str, tmp_path: Path) -> None:
    tiny_mixture(case).config.save_pretrained(tmp_path)
    model = open_model(tmp_path, "dummy")
    assert set(model.weights) == set(weight_shapes(model.spec))
    for way, logits in all_ways(
        TorchExecutor(model.spec, model.weights, page_tokens=16, num_pages=8)
    ).items():
        assert np.isfinite(logits).all(), way
    first, second = (model.weights[f"layers.2.experts.{e}.up"].to_float32() for e in range(2))
    assert not np.array_equal(first, second)


def config_of(case: str, **differences: Any) -> dict[str, Any]:
    return {**tiny_mixture(case).config.to_dict(), **differences}


@pytest.mark.parametrize(
    ("case", "differences", "named"),
    [
        ("mixtral", {"num_local_experts": 1 << 40}, "'num_local_experts': 1099511627776, not at"),
        ("mixtral", {"num_local_experts": 0}, "'num_local_experts': 0, not a positive integer"),
        ("mixtral", {"num_experts_per_tok": 6}, "'num_experts_per_tok': 6, not at most"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "'mlp_only_layers': 1, not a list of layers"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "'moe_intermediate_size': -1, not a positive"),
        ("olmoe", {"clip_qkv": -8.0}, "'clip_qkv': -8.0, not a positive number"),
        ("ernie4_5_moe", {"use_bias": 1}, "'use_bias': 1, not true or false"),
        ("phimoe", {"num_experts_per_tok": 3}, "'num_experts_per_tok': 3, not 2"),
        ("phimoe", {"rope_parameters": LONGROPE | {"short_factor": [1.0]}}, "not a list of 8 num"),
        ("phimoe", {"rope_parameters": LONGROPE | {"short_factor": [0] * 8}}, "'0': 0, not a posi"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 3, 3]}, "'moe_topk': [2, 3, 3], not the same for all"),
        ("hunyuan_v1_moe", {"moe_topk": [7, 7, 7]}, "'moe_topk': 7, not at most the number"),
        ("ernie4_5_moe", {"moe_layer_end_index": "x"}, "'moe_layer_end_index': 'x', not the index"),
        ("glm4_moe", {"n_group": 3}, "'n_group': 3, not groups of 2 or more that 8 experts make"),
        ("glm4_moe", {"topk_group": 1}, "'topk_group': 1, not as many of 4 groups as hold 3"),
        ("dots1", {"first_k_dense_replace": True}, "'first_k_dense_replace': True, not a positive"),
    ],
)
def test_fields_of_mixtures_that_do_not_fit_are_named(
    case: str, differences: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError) as refused:
        lower_config(config_of(case, **differences))
    assert named in str(refused.value)


def test_published_fields_of_mixtures_change_nothing() -> None:
    published: dict[str, dict[str, Any]] = {
        "gpt_oss": {"initial_context_length": 4096, "experts_per_token": 3},
        "ernie4_5_moe": {"moe_capacity": [64, 64, 64], "moe_gate": "topk"},
        "qwen3_moe": {"max_window_layers": 48, "router_aux_loss_coef": 0.5},
        "dots1": {"scoring_func": "noaux_tc", "moe_layer_freq": 1},
        "minimax_m2": {"attn_type_list": [1, 1], "use_qk_norm": True, "num_mtp_modules": 3},
        "hunyuan_v1_moe": {"moe_topk": [3, 3, 3], "num_shared_expert": [1, 1, 1]},
    }
    for case, fields in published.items():
        assert lower_config(config_of(case, **fields)) == lower_config(config_of(case))


def test_longrope_ends_at_the_trained_length() -> None:
    assert lower_config(config_of("phimoe with LongRoPE")).max_position == 32
