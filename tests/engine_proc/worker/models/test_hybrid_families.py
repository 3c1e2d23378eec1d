"""Every family of hybrids, lowered, generates the text of transformers, whatever its sequences go
through: batch mates, chunks, cached prefixes, preemptions, retries and deaths."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_hybrids
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from decoder_cases import answers_of, part_of_prompt
from generation import NUM_TOKENS, PROMPTS
from gguf_twins import write_gguf
from hybrid_models import HYBRIDS, TINY, tiny_hybrid
from random_decoders import SPEC, batch, random_weights, stored, with_states
from reference import endless_answers
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Executor
from headrace.engine_proc.worker.models.families import hybrids, mamba
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    GatedDeltaNetSpec,
    LayerSpec,
)
from headrace.engine_proc.worker.reference.torch_attention import place
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor
from headrace.errors import ModelError

Make = Callable[..., Executor]
Answers = list[list[int]]


@pytest.mark.parametrize("end", [-1, 0, 5, 99])
def test_core_refuses_states_that_end_outside_of_their_tokens(end: int, tmp_path: Path) -> None:
    tiny_hybrid("lfm2").save_pretrained(tmp_path)
    model = open_model(tmp_path)
    run = CpuExecutor(model.spec, model.weights, num_pages=6, page_tokens=16, num_states=2)
    with pytest.raises(ValueError, match="state"):
        run.forward(part_of_prompt(0, 4, state_ends=np.array([end], np.int32)))


IN_GGUF: dict[str, dict[str, Any]] = {  # and what llama.cpp has built in
    "lfm2": {},
    "lfm2_moe without a bias of experts": {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
    "lfm2_moe": {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "granitemoehybrid": {},
    "granitemoehybrid without experts": {"position_embedding_type": "nope"},
    "nemotron_h": {},
    "nemotron_h with experts and biases": {
        "use_bias": False,
        "mlp_bias": False,
        "n_group": 1,
        "topk_group": 1,
        "hybrid_override_pattern": "*EM*E",
    },
    "jamba": {},
    "jamba without experts, with biases": {"num_experts_per_tok": 1, "mamba_dt_rank": 4},
    "falcon_h1": {},
    "falcon_h1 without norms, with multipliers": {"mlp_bias": False, "projectors_bias": False},
    "kimi_linear": {
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "num_expert_group": 1,
        "topk_group": 1,
    },
}


@pytest.mark.parametrize("case", IN_GGUF)
def test_gguf_files_of_hybrids_generate_the_same(case: str, tmp_path: Path) -> None:
    model = tiny_hybrid(case, **IN_GGUF[case])
    path = write_gguf(tmp_path / "tiny.gguf", model)
    assert answers_of(path) == endless_answers(model, PROMPTS, NUM_TOKENS)


RENAMED = {  # by the converter, before it asks its table
    "dt_bias": "dt_proj.bias",
    "in_proj_qkvz": "in_proj_qkv",
}
ARCHITECTURES = {family: arch for arch, family in gguf_hybrids.ARCHITECTURES.items()}


@pytest.mark.parametrize(
    "architecture",
    [
        gguf.MODEL_ARCH.LFM2,
        gguf.MODEL_ARCH.LFM2MOE,
        gguf.MODEL_ARCH.QWEN3NEXT,
        gguf.MODEL_ARCH.QWEN35,
        gguf.MODEL_ARCH.QWEN35MOE,
    ],
)
def test_gguf_names_are_those_of_llama_cpp(architecture: gguf.MODEL_ARCH, tmp_path: Path) -> None:
    """The converter's own table has the names that the files of these tests have."""
    name = gguf.MODEL_ARCH_NAMES[architecture]
    model = tiny_hybrid(ARCHITECTURES.get(name, name))
    path = write_gguf(tmp_path / "tiny.gguf", model)
    table = gguf.get_tensor_name_map(architecture, TINY["num_hidden_layers"])
    names = set()
    for name in model.state_dict():
        for theirs, converters in RENAMED.items():
            name = name.replace(theirs, converters)
        if name != "lm_head.weight" and ".experts." not in name:
            names.add(table.get_name(name.removesuffix(".weight").removesuffix(".bias")))
    if "ssm_ba" in str(names):  # Qwen3-Next's qkvz are two tensors
        names |= {name.replace("ssm_ba", "attn_gate") for name in names if "ssm_ba" in name}
    stored = {
        tensor.name.removesuffix(".weight").removesuffix(".bias")
        for tensor in gguf.GGUFReader(path).tensors
        if "_exps" not in tensor.name
    }
    assert names == stored - {"output"}


@pytest.mark.parametrize("counts", [[2] * 4, [0] * 4, [2, 0, 1, 0], [2, 0]])
def test_gguf_files_with_other_kv_heads_are_refused(counts: list[int], tmp_path: Path) -> None:
    keys = {"attention.head_count_kv": counts}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_hybrid("lfm2"), keys=keys)
    with pytest.raises(ModelError, match=r"head_count_kv|blk"):
        open_model(path)


VISION = {  # as small as it goes
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def model_with_tower(family: str, is_tied: bool = False) -> Any:
    """Make a random model that takes images."""
    text = tiny_hybrid(f"{family}_text").config.to_dict()
    config = transformers.AutoConfig.for_model(
        family, text_config=text, vision_config=VISION, tie_word_embeddings=is_tied
    )
    return transformers.AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_text_of_models_that_take_images_is_served(
    family: str, is_tied: bool, tmp_path: Path
) -> None:
    model = model_with_tower(family, is_tied)
    model.save_pretrained(tmp_path)
    assert open_model(tmp_path).spec.tied_head == is_tied
    assert answers_of(tmp_path) == endless_answers(model, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_delta_nets_in_8_bit_floats_are_read(family: str, tmp_path: Path) -> None:
    """Rows that alternate by head are taken apart, whatever their format."""
    model = tiny_hybrid(family) if family == "qwen3_next" else model_with_tower(family)
    codes = {}
    for name, weight in model.named_parameters():
        if name.endswith((".in_proj_qkv.weight", ".in_proj_qkvz.weight", "attn.q_proj.weight")):
            scale = weight.detach().abs().amax(1, keepdim=True) / 448
            codes[name] = (weight.detach() / scale).to(torch.float8_e4m3fn)
            codes[name + "_scale"] = scale
            weight.data = codes[name].float() * scale
    model.save_pretrained(tmp_path)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    stored = safetensors.torch.load_file(path)
    assert codes.keys() & stored.keys()
    safetensors.torch.save_file(stored | codes, path)
    fields = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(fields))
    assert answers_of(tmp_path) == endless_answers(model, PROMPTS, NUM_TOKENS)


def test_kimi_s_delta_net_is_that_of_transformers() -> None:
    """The layer alone: its model attends with latent vectors."""
    config = transformers.AutoConfig.for_model(
        "kimi_linear", hidden_size=64, linear_head_dim=20, linear_num_heads=3, rms_norm_eps=1e-5
    )
    torch.manual_seed(0)
    module = KimiLinearDeltaAttention(config, layer_idx=0)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    delta = GatedDeltaNetSpec(
        num_key_heads=3, num_value_heads=3, key_dim=20, value_dim=20, kernel_size=4, gate_rank=20
    )
    layers = (LayerSpec(), LayerSpec(mixer=delta))
    spec = dataclasses.replace(SPEC, hidden_size=64, layers=layers)
    weights = dict(random_weights(spec))
    for name, theirs in KIMI.items():
        numbers = module.state_dict()[theirs].numpy()
        weights[f"layers.1.delta.{name}"] = stored(numbers if "proj" in theirs else numbers.ravel())
    weights["layers.1.delta.rate"] = stored(
        -module.forget_gate.A_log.detach().exp().numpy().ravel()
    )
    for name, kernel in zip("qkv", module.conv1d.weight.detach().chunk(3), strict=True):
        weights[f"layers.1.delta.{name}.conv"] = stored(kernel.numpy().ravel())
    run = TorchExecutor(spec, weights, num_pages=4, page_tokens=32, num_states=2)
    step = with_states(batch([(0, 0, 60)]))
    step = dataclasses.replace(step, state_out=np.full(4, 1, np.int32))
    places = place(step, 32, torch.device("cpu"))
    x = torch.randn(60, 64)
    with torch.inference_mode():
        expected = module(x[None])[0]
        expected = expected[0] if isinstance(expected, tuple) else expected
        ours = run.delta_net(1, delta, x, step, places)
    torch.testing.assert_close(ours, expected.view(60, 64), atol=1e-4, rtol=1e-4)


def test_layers_of_further_tokens_are_left_out(tmp_path: Path) -> None:
    tiny_hybrid("qwen3_5_text").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    extra = {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.up_proj.weight": torch.ones(2)}
    safetensors.torch.save_file(safetensors.torch.load_file(path) | extra, path)
    config = tmp_path / "config.json"
    published = {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mlp_only_layers": []}
    published |= {"mamba_ssm_dtype": "float32", "mtp_use_dedicated_embeddings": False}
    config.write_text(json.dumps(json.loads(config.read_text()) | published))
    assert not any("mtp" in name for name in open_model(tmp_path).weights)


def test_every_family_of_hybrids_has_a_case() -> None:
    families = hybrids.HYBRIDS | mamba.MAMBAS
    assert {case.split()[0] for case in HYBRIDS} == families.keys() | {"kimi_linear"}


KIMI = {  # of our weights, those that transformers' layer has as they are
    "q": "q_proj.weight",
    "k": "k_proj.weight",
    "v": "v_proj.weight",
    "b": "b_proj.weight",
    "a_in": "forget_gate.f_a_proj.weight",
    "a": "forget_gate.f_b_proj.weight",
    "a.bias": "forget_gate.dt_bias",
    "z_in": "g_a_proj.weight",
    "z": "g_b_proj.weight",
    "gated_norm": "o_norm.weight",
    "out": "o_proj.weight",
}
