"""Models that are a shape: a config and the demo model's tokenizer, for `--load-format dummy`.

What a step costs does not depend on what the weights are, but for mixtures: weights choose experts.
So a mixture's folder can have random weights, which all engines read.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec

from support.models import CACHE, demo_model
from support.tiny import write_tokenizer

QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1_000_000.0}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10_000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": QWEN
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
    # GPT-2's size as a Llama, whose MLP has a third matrix: as many numbers in all.
    "gpt2": LLAMA
    | {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 50304,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "tiny": LLAMA
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 49152,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}
MIXTURE = {
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "vocab_size": 49152,  # the demo model's: with few layers the head would weigh too much
}
# Some layers of mixtures, as many as two servers can have in bf16 beside each other.
SHAPES["qwen3-30b-a3b"] = MIXTURE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "rope_theta": 1_000_000.0,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
SHAPES["gpt-oss-20b"] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000.0,
    "max_position_embeddings": 4096,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "vocab_size": 49152,
}
SHAPES["mixtral-8x7b"] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "vocab_size": 49152,
}
# All layers of LFM2-1.2B, with the demo model's vocabulary.
SHAPES["lfm2-1.2b"] = {
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 16,
    "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-5,
    "max_position_embeddings": 128_000,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
# A quarter of the layers of Qwen3.5-9B, with the demo model's vocabulary.
SHAPES["qwen3.5-9b"] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(8)],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "vocab_size": 49152,
    "tie_word_embeddings": False,
}
# A quarter of the layers of MiniCPM3-4B, with the demo model's vocabulary.
SHAPES["minicpm3-4b"] = {
    "model_type": "minicpm3",
    "architectures": ["MiniCPM3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 16,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 32768,
    "vocab_size": 49152,
    "tie_word_embeddings": False,
}
SHAPES["micro"] = SHAPES["tiny"] | {"vocab_size": 512}  # for kernels alone: texts have more tokens


def full_config(name: str) -> dict[str, Any]:
    """Return the `config.json` of a shape."""
    shape = SHAPES[name]
    eps = {} if "norm_eps" in shape else {"rms_norm_eps": 1e-6}
    return {"hidden_act": "silu", "eos_token_id": 2} | eps | shape


def shape_folder(name: str, layers: int = 0, has_weights: bool = False) -> Path:
    """Return the folder of a shape, with so many layers; 0 is all of them."""
    config = full_config(name)
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    kind = "weights" if has_weights else "layers"
    folder = CACHE / f"shape-{name}-{config['num_hidden_layers']}-{kind}"
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        (unfinished / "config.json").write_bytes(msgspec.json.encode(config))
        write_tokenizer(demo_model(), unfinished)
        if has_weights:
            from support.random_folder import write_weights  # with transformers

            write_weights(unfinished, config)
        unfinished.rename(folder)
    return folder
