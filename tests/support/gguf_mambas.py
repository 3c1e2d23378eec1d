"""What the converter of llama.cpp writes of decoders with Mamba. Names are the gguf package's."""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from demo_in_transformers import permuted

Floats = npt.NDArray[np.float32]
ARCHITECTURES = {
    "granitemoehybrid": "granitehybrid",
    "jamba": "jamba",
    "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon-h1",
}
PERMUTED = ("granitehybrid", "nemotron_h", "nemotron_h_moe")


def is_moe(config: Any) -> bool:
    """Whether a model has experts."""
    if config.model_type == "nemotron_h":
        return "moe" in config.layer_types
    return bool(getattr(config, "num_local_experts", 0))


def architecture_of(config: Any) -> str:
    """Return what a file calls itself."""
    name = ARCHITECTURES[config.model_type]
    return "nemotron_h_moe" if name == "nemotron_h" and is_moe(config) else name


def metadata(config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    """Return the keys of an architecture."""
    if config.model_type == "jamba":
        yield from jamba(config)
        return
    is_nemotron = config.model_type == "nemotron_h"
    prefix = "" if is_nemotron else "mamba_"
    num_heads = config.mamba_num_heads if is_nemotron else config.mamba_n_heads
    head_dim = config.mamba_head_dim if is_nemotron else config.mamba_d_head
    eps = config.layer_norm_epsilon if is_nemotron else config.rms_norm_eps
    yield "context_length", config.max_position_embeddings
    yield "embedding_length", config.hidden_size
    yield "block_count", config.num_hidden_layers
    yield "feed_forward_length", config.intermediate_size
    yield "attention.head_count", config.num_attention_heads
    yield "attention.head_count_kv", config.num_key_value_heads
    yield "attention.layer_norm_rms_epsilon", float(eps)
    yield "vocab_size", config.vocab_size
    yield "ssm.conv_kernel", config.conv_kernel if is_nemotron else config.mamba_d_conv
    yield "ssm.inner_size", num_heads * head_dim
    yield "ssm.state_size", config.ssm_state_size if is_nemotron else config.mamba_d_state
    yield "ssm.time_step_rank", num_heads
    yield "ssm.group_count", getattr(config, f"{prefix}n_groups")
    if architecture == "falcon-h1":
        yield "rope.freq_base", float(config.rope_parameters["rope_theta"])
        return
    attends = [kind == "full_attention" for kind in config.layer_types]
    yield "attention.head_count_kv", [config.num_key_value_heads if a else 0 for a in attends]
    yield "rope.scaling.finetuned", False
    yield from nemotron(config) if is_nemotron else granite(config)


def jamba(config: Any) -> Iterator[tuple[str, Any]]:
    """Return the keys of Jamba."""
    offset, period = config.attn_layer_offset, config.attn_layer_period
    attends = [i % period == offset for i in range(config.num_hidden_layers)]
    yield "block_count", config.num_hidden_layers
    yield "context_length", config.max_position_embeddings
    yield "embedding_length", config.hidden_size
    yield "feed_forward_length", config.intermediate_size
    yield "attention.head_count", config.num_attention_heads
    yield "attention.head_count_kv", [config.num_key_value_heads if a else 0 for a in attends]
    yield "attention.layer_norm_rms_epsilon", float(config.rms_norm_eps)
    yield "ssm.conv_kernel", config.mamba_d_conv
    yield "ssm.inner_size", config.mamba_expand * config.hidden_size
    yield "ssm.state_size", config.mamba_d_state
    yield "ssm.time_step_rank", config.mamba_dt_rank
    yield "expert_count", config.num_experts
    yield "expert_used_count", config.num_experts_per_tok
    yield "vocab_size", config.vocab_size


def granite(config: Any) -> Iterator[tuple[str, Any]]:
    """Return the keys of Granite 4 alone."""
    yield "attention.scale", float(config.attention_multiplier)
    yield "embedding_scale", float(config.embedding_multiplier)
    yield "residual_scale", float(config.residual_multiplier)
    yield "logit_scale", float(config.logits_scaling)
    yield "expert_shared_feed_forward_length", config.shared_intermediate_size
    if is_moe(config):
        yield "expert_count", config.num_local_experts
        yield "expert_used_count", config.num_experts_per_tok


def nemotron(config: Any) -> Iterator[tuple[str, Any]]:
    """Return the keys of Nemotron-H alone."""
    size = config.moe_intermediate_size if is_moe(config) else config.intermediate_size
    has_mlp = [kind in ("mlp", "moe") for kind in config.layer_types]
    yield "feed_forward_length", [size if has else 0 for has in has_mlp]
    yield "attention.key_length", config.head_dim
    yield "attention.value_length", config.head_dim
    if is_moe(config):
        yield "expert_count", config.n_routed_experts
        yield "expert_used_count", config.num_experts_per_tok
        yield "expert_feed_forward_length", config.moe_intermediate_size
        yield "expert_shared_feed_forward_length", config.moe_shared_expert_intermediate_size
        yield "expert_shared_count", config.n_shared_experts
        yield "expert_weights_norm", config.norm_topk_prob
        yield "expert_weights_scale", float(config.routed_scaling_factor)
        yield "expert_group_count", config.n_group


def tensors(model: Any, architecture: str) -> Iterator[tuple[str, Floats]]:
    """Return the tensors under the names of the file."""
    config = model.config
    number = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for theirs, parameter in model.state_dict().items():
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for name, numbers in parts(theirs, parameter.numpy(), config):
            if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
                is_query = "q_proj" in name
                heads = config.num_attention_heads if is_query else config.num_key_value_heads
                numbers = permuted(numbers, heads)
            stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            yield stored, np.ascontiguousarray(numbers)


def parts(name: str, numbers: Floats, config: Any) -> Iterator[tuple[str, Floats]]:
    """Return what a tensor is before it is renamed."""
    is_nemotron, is_jamba = (config.model_type == kind for kind in ("nemotron_h", "jamba"))
    if is_nemotron:
        name = name.replace("model.", "backbone.")
    if config.model_type == "falcon_h1":
        numbers = multiplied(name, numbers, config)
    modules = ("_moe.", ".shared_mlp.", "mixer.experts.", ".feed_forward.experts.")
    if any(module in name for module in modules):
        yield from mlp_parts(name, numbers, config)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), numbers
    elif name.endswith("A_log"):
        yield name, -np.exp(numbers) if is_jamba else -np.exp(numbers)[:, None]
    elif name.endswith(".D") and not is_jamba:
        yield name, numbers[:, None]
    elif name.endswith("conv1d.weight"):
        yield name, numbers[:, 0]
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        num_groups = config.n_groups if is_nemotron else config.mamba_n_groups
        yield name, numbers.reshape(num_groups, -1)
    else:
        yield name.replace("correction_bias", "correction.bias"), numbers


def mlp_parts(name: str, numbers: Floats, config: Any) -> Iterator[tuple[str, Floats]]:
    """Return what a tensor of experts, or of the MLP beside them, is before it is renamed."""
    layer = ".".join(name.replace("backbone", "model").split(".")[:3])
    last = name.removesuffix(".weight").rpartition(".")[2]
    shared = f"{layer}.mlp.shared_experts" if is_moe(config) else f"{layer}.mlp"
    experts = f"{layer}.mlp.experts"
    if last == "router":
        yield f"{layer}.block_sparse_moe.router.layer.weight", numbers
    elif last == "output_linear":
        yield f"{shared}.down_proj.weight", numbers
    elif last in ("input_linear", "gate_up_proj"):
        module = shared if last == "input_linear" else experts
        gate, up = np.split(numbers, 2, axis=-2)
        yield f"{module}.gate_proj.weight", gate
        yield f"{module}.up_proj.weight", up
    else:
        yield f"{experts}.{last}.weight", numbers


def multiplied(name: str, numbers: Floats, config: Any) -> Floats:
    """Return a weight of Falcon-H1 with the multipliers that belong to it."""
    gate, down = config.mlp_multipliers
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "self_attn.o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    for part, factor in factors.items():
        if part in name:
            return numbers * np.float32(factor)
    if "in_proj" not in name:
        return numbers
    of_groups = config.mamba_n_groups * config.mamba_d_state
    counts = (config.mamba_d_ssm, config.mamba_d_ssm, of_groups, of_groups, config.mamba_n_heads)
    columns = np.repeat(np.array(config.ssm_multipliers, np.float32), counts)
    return numbers * columns[:, None] * np.float32(config.ssm_in_multiplier)
