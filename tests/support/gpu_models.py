"""Models whose kernels are compiled for GPUs: of each, one layer, as one of its workers has it."""

from dataclasses import replace
from typing import Any

from headrace.engine_proc.worker.cuda.mixtures.expert_linear import ExpertFormat
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    AltUpSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    Mixer,
    MixtureSpec,
    Norm,
    NormPlacement,
    PerLayerSpec,
    QKNorm,
    QueryTemperature,
    RopeTable,
    RouterScore,
    ShortConvSpec,
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


def with_experts(spec: DecoderSpec, **fields: Any) -> DecoderSpec:
    """Return a decoder with a mixture in place of its MLP."""
    layers = tuple(replace(layer, mixture=MixtureSpec(**fields)) for layer in spec.layers)
    return replace(spec, layers=layers)


def deepseek_v3(num_workers: int) -> DecoderSpec:
    """Return the first share of a DeepSeek V3."""
    latent = LatentAttentionSpec(
        query_rank=1536, rank=512, nope_dim=128, rope_dim=64, value_dim=128
    )
    rope = RopeTable(inv_freq=(1.0,) * 32, interleaved=True)
    spec = with_experts(
        decoder(129280 // num_workers, 7168, 18432, 128 // num_workers, 1, latent.latent_dim),
        num_experts=256,
        experts_per_token=8,
        intermediate_size=2048,
        score=RouterScore.SIGMOID,
        weight_scale=2.5,
        selection_bias=True,
        num_groups=8,
        groups_per_token=4,
        shared_intermediate_size=2048 // num_workers,
        local_experts=range(256 // num_workers),
    )
    layers = tuple(replace(layer, mixer=latent) for layer in spec.layers)
    return replace(spec, layers=layers, ropes=(rope,))


def hybrid(spec: DecoderSpec, mixer: Mixer, **fields: Any) -> DecoderSpec:
    """Return a decoder with a layer of a mixer, and one that attends."""
    (attention,) = spec.layers
    return replace(spec, layers=(replace(attention, mixer=mixer, **fields), attention))


QWEN3_NEXT = hybrid(
    decoder(
        151936,
        2048,
        5120,
        16,
        2,
        256,
        norm=Norm.RMS_ONE_PLUS,
        qk_norm=QKNorm.PER_HEAD,
        attention_gate=True,
        ropes=(RopeTable(inv_freq=(1.0,) * 32),),
    ),
    GatedDeltaNetSpec(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, kernel_size=4
    ),
)
GRANITE4_SMALL = decoder(100352, 4096, 1536, 32, 8, ropes=(), residual_multiplier=0.22)
GRANITE4_SMALL = replace(GRANITE4_SMALL, layers=(LayerSpec(rope=None),))
STATES = {  # a layer with states beside one that attends
    "LFM2 1.2B": hybrid(
        decoder(65536, 2048, 8192, 32, 8, 64, qk_norm=QKNorm.PER_HEAD),
        ShortConvSpec(channels=2048, kernel_size=3),
    ),
    "Qwen3 Next 80B-A3B, fp8": with_experts(
        QWEN3_NEXT,
        num_experts=512,
        experts_per_token=10,
        intermediate_size=512,
        shared_intermediate_size=512,
        shared_gate=True,
    ),
    "Granite 4 small, fp8": with_experts(
        hybrid(
            GRANITE4_SMALL,
            Mamba2Spec(
                num_heads=128,
                head_dim=64,
                state_size=128,
                num_groups=1,
                kernel_size=4,
                norm_size=8192,
            ),
        ),
        num_experts=72,
        experts_per_token=10,
        intermediate_size=768,
        shared_intermediate_size=1536,
    ),
    "Nemotron H 8B": decoder(
        131072,
        4096,
        21504,
        32,
        8,
        ropes=(),
        activation=Activation.RELU2,
        gated_mlp=False,
        layers=(
            LayerSpec(
                mixer=Mamba2Spec(
                    num_heads=128,
                    head_dim=64,
                    state_size=128,
                    num_groups=8,
                    kernel_size=4,
                    norm_size=1024,
                ),
                has_mlp=False,
            ),
            LayerSpec(rope=None, has_mlp=False),
            LayerSpec(has_mixer=False),
        ),
    ),
    "Falcon H1 7B": hybrid(
        decoder(130048, 3072, 12288, 12, 2, gate_multiplier=0.88),
        Mamba2Spec(
            num_heads=24,
            head_dim=128,
            state_size=256,
            num_groups=1,
            kernel_size=4,
            multipliers=(0.35, 0.25, 0.18, 0.5, 0.35),
        ),
        attention_beside=True,
    ),
}

NEMOTRON_NANO = decoder(
    131072,
    2688,
    1856,
    32,
    2,
    ropes=(),
    activation=Activation.RELU2,
    gated_mlp=False,
    layers=(
        LayerSpec(
            mixer=Mamba2Spec(
                num_heads=64,
                head_dim=64,
                state_size=128,
                num_groups=8,
                kernel_size=4,
                norm_size=512,
            ),
            has_mlp=False,
        ),
        LayerSpec(rope=None, has_mlp=False),
        LayerSpec(
            has_mixer=False,
            mixture=MixtureSpec(
                num_experts=128,
                experts_per_token=6,
                intermediate_size=1856,
                score=RouterScore.SIGMOID,
                selection_bias=True,
                weight_scale=2.5,
                shared_intermediate_size=3712,
            ),
        ),
    ),
)
STATES |= {f"Nemotron 3 Nano 30B-A3B, {held}": NEMOTRON_NANO for held in ("dense", "fp8")}
STATES["Jamba mini, fp8"] = with_experts(
    hybrid(
        replace(decoder(65536, 4096, 14336, 32, 8, ropes=()), layers=(LayerSpec(rope=None),)),
        MambaSpec(channels=8192, state_size=16, rank=256, kernel_size=4, norms=True),
    ),
    num_experts=16,
    experts_per_token=2,
    intermediate_size=14336,
    normalized=False,
)

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

SEES_AHEAD = ("Gemma 3 4B", "Gemma 3 12B", "Gemma 3 27B")  # tokens of an image see all of it


def gemma4(*sizes: int, window: int = 1024, **full: Any) -> DecoderSpec:
    """Return a Gemma 4: a layer with a window, and one without, whose heads are wider.

    Args:
        full: what differs in the layer without a window.
    """
    rope = RopeTable(inv_freq=(1.0,) * 256)
    return decoder(
        262144,
        *sizes,
        head_dim=256,
        placement=NormPlacement.PRE_POST,
        qk_norm=QKNorm.PER_HEAD,
        value_norm=True,
        layer_scale=True,
        activation=Activation.GELU_TANH,
        layers=(
            LayerSpec(rope=1, window=window),
            LayerSpec(head_dim=512, is_causal=True, **full),
        ),
        ropes=(rope, RopeTable(inv_freq=(1.0,) * 128)),
        embedding_multiplier=8.0,
    )


def with_shared_keys(spec: DecoderSpec) -> DecoderSpec:
    """Return a Gemma with embeddings per layer, and layers that read the keys of others."""
    more = tuple(replace(layer, keys_of=index) for index, layer in enumerate(spec.layers))
    per_layer = PerLayerSpec(size=256, vocab_size=262144)
    return replace(spec, layers=spec.layers + more, per_layer=per_layer)


GEMMA3N = with_shared_keys(
    replace(
        gemma3(262400, 2048, 16384, 8, 2, window=512),
        norm=Norm.RMS,
        value_norm=True,
        layers=(LayerSpec(window=512, gate_cut=1.645), LayerSpec()),
        altup=AltUpSpec(num_inputs=4, rank=64),
    )
)
MODELS |= {
    "Gemma 3n E4B": GEMMA3N,
    "Gemma 4 E4B": with_shared_keys(gemma4(2560, 10240, 8, 2, window=512)),
    "Gemma 4 31B": gemma4(5376, 21504, 32, 16, num_kv_heads=4, has_values=False),
}
SEES_AHEAD += ("Gemma 4 E4B", "Gemma 4 31B")
MODELS |= {
    "Hunyuan 7B": decoder(128167, 4096, 14336, 32, 8, qk_norm=QKNorm.PER_HEAD_AFTER_ROPE),
    "Ministral 3 8B": decoder(
        131072,
        4096,
        14336,
        32,
        8,
        layers=(LayerSpec(temperature=QueryTemperature(scale=0.1, tokens=16384, offset=0)),),
    ),
    "Apertus 8B": decoder(
        131072,
        4096,
        21504,
        32,
        8,
        qk_norm=QKNorm.PER_HEAD,
        activation=Activation.XIELU,
        gated_mlp=False,
    ),
    "Minitron 4B": decoder(
        256000,
        3072,
        9216,
        24,
        8,
        norm=Norm.LAYER_ONE_PLUS,
        norm_bias=True,
        activation=Activation.RELU2,
        gated_mlp=False,
        ropes=(RopeTable(inv_freq=(1.0,) * 32),),
    ),
    "Llama 4 Scout, attention": decoder(  # with the vocabulary of Qwen 3
        151936,
        5120,
        8192,
        40,
        8,
        qk_norm=QKNorm.UNWEIGHTED_AFTER_ROPE,
        layers=(
            LayerSpec(window=8192, is_chunked=True, has_mlp=False),
            LayerSpec(
                rope=None,
                temperature=QueryTemperature(scale=0.1, tokens=8192),
                has_mlp=False,
            ),
        ),
    ),
}

MIXTURES = {  # a name with experts ends with the format of its experts
    "Mixtral 8x7B, int4": with_experts(
        decoder(32000, 4096, 14336, 32, 8),
        num_experts=8,
        experts_per_token=2,
        intermediate_size=14336,
    ),
    "Qwen3 30B-A3B, fp8": with_experts(
        qwen3(2048, 6144, 32), num_experts=128, experts_per_token=8, intermediate_size=768
    ),
    "gpt-oss 20B, mxfp4": with_experts(
        decoder(201088, 2880, 2880, 64, 8, 64, attention_sinks=True, output_bias=True),
        num_experts=32,
        experts_per_token=4,
        intermediate_size=2880,
        router_bias=True,
        expert_bias=True,
        clamp=7.0,
        swish_beta=1.702,
    ),
    "DeepSeek V3, TP 8, fp8": deepseek_v3(8),
    "Gemma 4 26B-A4B, dense": with_experts(
        gemma4(2816, 2112, 16, 8, num_kv_heads=2, has_values=False),
        num_experts=128,
        experts_per_token=8,
        intermediate_size=704,
        shared_intermediate_size=2112,
        own_norms=True,
        expert_scales=True,
    ),
}
PACKED = {  # of a name without experts, too, the end is a format: that of its layers
    "Qwen3 8B, fp8": MODELS["Qwen3 8B"],
    "Qwen3 8B, int4": MODELS["Qwen3 8B"],
}
MODELS |= MIXTURES | STATES | PACKED
GROUPS = {  # terms under a scale
    ExpertFormat.INT4: 128,
    ExpertFormat.FP8: 128,
    ExpertFormat.MXFP4: 32,
}


def format_of(name: str) -> ExpertFormat:
    """Return the format of a model's experts, or of its layers.

    Raises:
        KeyError: a name that ends with a format ends with none of them.
    """
    has_experts = any(layer.mixture is not None for layer in MODELS[name].layers)
    if not has_experts and name not in PACKED:
        return ExpertFormat.DENSE
    return ExpertFormat[name.rpartition(", ")[2].upper()]
