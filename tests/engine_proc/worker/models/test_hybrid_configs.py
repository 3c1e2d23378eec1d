"""Configs of hybrids: published ones are read, wrong ones refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hybrid_models import (
    tiny_hybrid,
)

from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
)
from headrace.errors import ModelError

PUBLISHED = {  # as LFM2's own config.json has it
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "full_attn_idxs": [2, 5],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "use_pos_enc": True,
    "vocab_size": 65536,
}


PUBLISHED_GRANITE = {  # the fields of Granite 4's own config.json
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "intermediate_size": 512,
    "layer_types": ["mamba", "mamba", "attention"],
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}


PUBLISHED_NEMOTRON = {  # the fields of Nemotron-H's own config.json
    "attention_bias": False,
    "attention_head_dim": 64,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M*-",
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "num_query_groups": 8,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 256,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
PUBLISHED_FALCON = {  # the fields of Falcon-H1's own config.json
    "attention_bias": False,
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.31],
    "ssm_out_multiplier": 0.23,
    "tie_word_embeddings": False,
    "vocab_size": 65537,
}
PUBLISHED_KIMI = {  # the fields of Kimi-Linear's own config.json
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 5],
        "head_dim": 128,
        "kda_layers": [1, 2, 3],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_older_config_of_lfm2_is_read() -> None:
    spec = lower_config(PUBLISHED)
    assert [layer.mixer is None for layer in spec.layers] == [i in (2, 5) for i in range(6)]
    assert (spec.intermediate_size, spec.tied_head, spec.state_numbers) == (8192, True, 4 * 4096)


def test_infinity_in_a_config_is_read(tmp_path: Path) -> None:
    """It is no number of JSON. Older versions of transformers wrote it so."""
    tiny_hybrid("bamba").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"time_step_limit": [0, math.inf]}
    path.write_text(json.dumps(config))
    assert "[0, Infinity]" in path.read_text()
    assert [one.has_pages for one in open_model(tmp_path).spec.layers].count(True) == 1


def test_published_config_of_nemotron_h_is_read() -> None:
    spec = lower_config(PUBLISHED_NEMOTRON)
    kinds = [(layer.attends, layer.mixer is not None, layer.has_mlp) for layer in spec.layers]
    mamba, mlp = (False, True, False), (False, False, True)
    assert kinds == [mamba, mlp, mamba, (True, False, False), mlp]
    assert (spec.head_dim, spec.gated_mlp, spec.activation) == (64, False, Activation.RELU2)
    assert spec.state_numbers == 2 * (3 * (8192 + 2 * 8 * 128) + 8192 * 128)


def test_published_config_of_falcon_h1_is_read() -> None:
    spec = lower_config(PUBLISHED_FALCON)
    assert all(layer.has_pages for layer in spec.layers)
    assert spec.state_numbers == 2 * (3 * (3072 + 2 * 256) + 3072 * 256)
    assert spec.attention_scale == 128**-0.5 * 0.5**2 * 0.390625


def test_published_config_of_granite_4_is_read() -> None:
    spec = lower_config(PUBLISHED_GRANITE)
    assert [layer.attends for layer in spec.layers] == [False, False, True]
    assert spec.state_numbers == 2 * (3 * (3072 + 2 * 128) + 3072 * 128)
    assert spec.layers[2].rope is None


def test_published_config_of_kimi_linear_is_read() -> None:
    spec = lower_config(PUBLISHED_KIMI)
    assert [layer.has_pages for layer in spec.layers] == [False] * 3 + [True] * 2
    assert [layer.mixture is None for layer in spec.layers] == [True] + [False] * 4
    assert (spec.max_position, spec.head_dim, spec.ropes) == (1 << 20, 512 + 64, ())
    assert spec.state_numbers == 3 * (3 * 3 * 4096 + 128 * 4096)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_types": ["linear_attention"] * 4},
        {"linear_num_value_heads": 5},
        {"linear_conv_kernel_dim": 0},
        {"attn_output_gate": False},
        {"norm_topk_prob": False},
    ],
)
def test_wrong_delta_nets_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    tiny_hybrid("qwen3_5_moe_text").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(ModelError, match=next(iter(wrong))):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("lfm2", {"layer_types": ["conv"] * 4}),
        ("lfm2", {"layer_types": ["mamba"] * 4}),
        ("lfm2", {"conv_L_cache": 0}),
        ("bamba", {"attn_layer_indices": 2}),
        ("bamba", {"attn_layer_indices": []}),
        ("bamba", {"mamba_n_heads": 7}),
        ("bamba", {"mamba_n_groups": 3}),
        ("bamba", {"time_step_limit": [0.01, 0.1]}),
        ("granitemoehybrid", {"layer_types": ["conv"] * 4}),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}),
        ("nemotron_h", {"layers_block_type": ["mlp", "mamba"]}),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-"}),
        ("nemotron_h", {"moe_latent_size": 8}),
        ("nemotron_h", {"attention_bias": True}),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}),
        ("jamba", {"attn_layer_offset": 7}),
        ("jamba", {"attn_layer_period": 8, "attn_layer_offset": 7}),
        ("jamba", {"mamba_dt_rank": "wide"}),
        ("falcon_h1", {"ssm_multipliers": [1.0]}),
        ("falcon_h1", {"mamba_proj_bias": True, "ssm_in_multiplier": 2.0}),
        ("granitemoehybrid", {"normalization_function": "layernorm"}),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}),
        ("kimi_linear", {"mla_use_nope": False}),
        ("kimi_linear", {"layer_types": ["linear_attention"] * 4}),
    ],
)
def test_wrong_hybrids_are_refused(tmp_path: Path, family: str, wrong: dict[str, Any]) -> None:
    tiny_hybrid(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(ModelError, match="|".join(wrong)):
        open_model(tmp_path)
