"""What the converter of llama.cpp writes of Gemma 3n and Gemma 4."""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from torch import tensor
from torch.distributions.normal import Normal

Floats = npt.NDArray[np.float32]
ARCHITECTURES = {"gemma3n_text": "gemma3n", "gemma4_text": "gemma4"}
STACKS = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def metadata(config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    """Return the keys of a file."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    yield "context_length", config.max_position_embeddings
    yield "embedding_length", config.hidden_size
    yield "block_count", config.num_hidden_layers
    yield "attention.head_count", config.num_attention_heads
    yield "attention.layer_norm_rms_epsilon", config.rms_norm_eps
    yield "attention.sliding_window", config.sliding_window
    yield "attention.sliding_window_pattern", slides
    yield "attention.shared_kv_layers", config.num_kv_shared_layers
    yield "embedding_length_per_layer_input", config.hidden_size_per_layer_input
    if config.final_logit_softcapping is not None:
        yield "final_logit_softcapping", config.final_logit_softcapping
    ropes = config.rope_parameters
    yield "rope.freq_base", float(ropes["full_attention"]["rope_theta"])
    yield "rope.freq_base_swa", float(ropes["sliding_attention"]["rope_theta"])
    yield from (of_gemma4 if architecture == "gemma4" else of_gemma3n)(config)


def of_gemma3n(config: Any) -> Iterator[tuple[str, Any]]:
    """Return the keys of Gemma 3n alone."""
    yield "feed_forward_length", config.intermediate_size
    yield "attention.head_count_kv", config.num_key_value_heads
    yield "attention.key_length", config.head_dim
    yield "attention.value_length", config.head_dim
    yield "altup.active_idx", config.altup_active_idx
    yield "altup.num_inputs", config.altup_num_inputs
    shares = tensor(config.activation_sparsity_pattern)
    yield "activation_sparsity_scale", Normal(0, 1).icdf(shares).tolist()


def of_gemma4(config: Any) -> Iterator[tuple[str, Any]]:
    """Return the keys of Gemma 4 alone."""
    kinds = ("full_attention", "sliding_attention")
    full, sliding = (config.per_layer_config[kind] for kind in kinds)
    count, first = config.num_hidden_layers, config.num_hidden_layers - config.num_kv_shared_layers
    wide = [1 + (config.use_double_wide_mlp and i >= first) for i in range(count)]
    yield "feed_forward_length", [config.intermediate_size * factor for factor in wide]
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    heads = [sliding.num_key_value_heads if s else full.num_key_value_heads for s in slides]
    yield "attention.head_count_kv", heads
    yield "attention.key_length", full.head_dim
    yield "attention.value_length", full.head_dim
    yield "attention.key_length_swa", sliding.head_dim
    yield "attention.value_length_swa", sliding.head_dim
    yield "rope.dimension_count", full.head_dim
    yield "rope.dimension_count_swa", sliding.head_dim
    if config.enable_moe_block:
        yield "expert_count", config.num_experts
        yield "expert_used_count", config.top_k_experts
        yield "expert_feed_forward_length", config.moe_intermediate_size


def tensors(model: Any, architecture: str) -> Iterator[tuple[str, Floats]]:
    """Return the tensors, under the names that the converter's own table has."""
    config = model.config
    arch = gguf.MODEL_ARCH.GEMMA4 if architecture == "gemma4" else gguf.MODEL_ARCH.GEMMA3N
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stacks: dict[str, list[Floats]] = {}
    for name, weight in model.state_dict().items():
        numbers = weight.numpy()
        part = name.removeprefix("model.").split(".")[0]
        scale = next((own for theirs, own in SCALES.items() if name.endswith(theirs)), None)
        if part in STACKS:
            stacks.setdefault(STACKS[part], []).append(numbers)
        elif scale is not None:
            yield f"blk.{name.split('.')[2]}.{scale}", numbers
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            stored = table.get_name(name.removesuffix(".weight"))
            assert stored is not None, name
            yield f"{stored}.weight", numbers
    for name, matrices in stacks.items():
        yield f"{name}.weight", np.stack(matrices)
    if architecture == "gemma4":
        frequencies = model.model.rotary_emb.full_attention_inv_freq.numpy()
        yield "rope_freqs.weight", np.where(frequencies > 0, 1, 1e30).astype(np.float32)
