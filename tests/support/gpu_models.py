"""Models whose kernels are compiled for GPUs: of each, one layer, as one of its workers has it."""

from dataclasses import replace
from typing import Any

from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    LayerSpec,
    Norm,
    NormPlacement,
    QKNorm,
    RopeTable,
)
from headrace.engine_proc.worker.parallel.shard import INNER_UNIT, Shard, cut, cut_heads, shard_spec


def decoder(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int = 128,
    **fields: Any,
) -> DecoderSpec:
    """Return a decoder of one layer of these sizes."""
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_heads": num_heads}
    rope = RopeTable(inv_freq=(1.0,) * (head_dim // 2))
    given = {"layers": (LayerSpec(),), "ropes": (rope,), "tied_head": False} | fields
    return DecoderSpec(
        architecture="",
        intermediate_size=intermediate_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=1 << 15,
        **sizes,
        **given,
    )


def qwen3(*sizes: int) -> DecoderSpec:
    """Return a Qwen 3."""
    return decoder(151936, *sizes, num_kv_heads=8, qk_norm=QKNorm.PER_HEAD)


def gemma3(vocab_size: int, *sizes: int, window: int = 1024, head_dim: int = 256) -> DecoderSpec:
    """Return a Gemma 3: a layer with a window, and one without."""
    return decoder(
        vocab_size,
        *sizes,
        head_dim=head_dim,
        norm=Norm.RMS_ONE_PLUS,
        placement=NormPlacement.PRE_POST,
        qk_norm=QKNorm.PER_HEAD,
        activation=Activation.GELU_TANH,
        layers=(LayerSpec(window=window), LayerSpec()),
        embedding_multiplier=8.0,
    )


def qwen25_vl(*sizes: int) -> DecoderSpec:
    """Return a Qwen 2.5 VL."""
    spec = decoder(*sizes, qkv_bias=True)
    return replace(spec, ropes=(replace(spec.ropes[0], axes=(0,) * 64),))


def cut_to(spec: DecoderSpec, num_workers: int) -> DecoderSpec:
    """Return the first share, which is the largest."""
    heads, kv_heads = cut_heads(spec.num_heads, spec.num_kv_heads, num_workers)[0]
    inner = cut(spec.intermediate_size, num_workers, INNER_UNIT)[0]
    tokens = cut(spec.vocab_size, num_workers)[0]
    return shard_spec(spec, Shard(0, heads, kv_heads, inner, tokens))


LLAMA_8B = decoder(128256, 4096, 14336, 32, 8)
LLAMA_70B = decoder(128256, 8192, 28672, 64, 8)
MODELS = {
    **{f"Llama 3 8B, TP {n}": cut_to(LLAMA_8B, n) for n in (1, 2, 4, 8)},
    **{f"Llama 3 70B, TP {n}": cut_to(LLAMA_70B, n) for n in (1, 2, 4, 8)},
    "Qwen3 0.6B": qwen3(1024, 3072, 16),
    "Qwen3 1.7B": qwen3(2048, 6144, 16),
    "Qwen3 4B": qwen3(2560, 9728, 32),
    "Qwen3 8B": qwen3(4096, 12288, 32),
    "Qwen3 14B": qwen3(5120, 17408, 40),
    "Qwen3 32B": qwen3(5120, 25600, 64),
    "Gemma 3 1B": gemma3(262144, 1152, 6912, 4, 1, window=512),
    "Gemma 3 4B": gemma3(262208, 2560, 10240, 8, 4),
    "Gemma 3 12B": gemma3(262208, 3840, 15360, 16, 8),
    "Gemma 3 27B": gemma3(262208, 5376, 21504, 32, 16, head_dim=128),
    "Qwen2.5 VL 3B": qwen25_vl(151936, 2048, 11008, 16, 2),
    "Qwen2.5 VL 7B": qwen25_vl(152064, 3584, 18944, 28, 4),
    "Qwen2.5 VL 72B": qwen25_vl(152064, 8192, 29568, 64, 8),
}
