"""Small decoders of random weights, and batches for them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weights
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Floats
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    AltUpSpec,
    DecoderSpec,
    EagleSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
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
from headrace.engine_proc.worker.models.weight_shapes import is_one_plus, weight_shapes

NUM_PAGES = 80
LENGTH = 300  # more than one attention segment
# First and last position of each image of every sequence: within a segment, and across two.
IMAGES = ((5, 20), (21, 22), (40, 70), (240, 270))
NUM_ROWS = 90  # there are of them
# Of GGUF's blocks: numbers, bytes, and where fp16 scales lie, with a range for them.
LOW, HIGH = (0.002, 0.02), (-0.2, 0.0)
BLOCKS = {
    Format.Q8_0: (32, 34, {0: LOW}),
    Format.Q4_0: (32, 18, {0: LOW}),
    Format.Q4_1: (32, 20, {0: LOW, 2: HIGH}),
    Format.Q5_0: (32, 22, {0: LOW}),
    Format.Q5_1: (32, 24, {0: LOW, 2: HIGH}),
    Format.Q2_K: (256, 84, {80: (0.002, 0.01), 82: (0.002, 0.01)}),
    Format.Q3_K: (256, 110, {108: (0.0002, 0.002)}),
    Format.Q4_K: (256, 144, {0: (0.0001, 0.0005), 2: (0.001, 0.003)}),
    Format.Q5_K: (256, 176, {0: (0.00005, 0.0002), 2: (0.001, 0.003)}),
    Format.Q6_K: (256, 210, {208: (0.00002, 0.00008)}),
    Format.IQ4_NL: (32, 18, {0: (0.0002, 0.002)}),
    Format.IQ4_XS: (256, 136, {0: (0.00001, 0.0001)}),
    Format.MXFP4: (32, 17, {}),
}
DECODED = {  # blocks for which the core has no kernels
    Format.IQ1_S: (256, 50, {0: (0.01, 0.02)}),
    Format.IQ2_XXS: (256, 66, {0: (0.0005, 0.002)}),
    Format.IQ2_XS: (256, 74, {0: (0.0005, 0.002)}),
    Format.IQ2_S: (256, 82, {0: (0.0005, 0.002)}),
    Format.IQ3_XXS: (256, 98, {0: (0.0002, 0.001)}),
    Format.IQ3_S: (256, 110, {0: (0.0002, 0.001)}),
    Format.TQ1_0: (256, 54, {52: (0.05, 0.1)}),
    Format.TQ2_0: (256, 66, {64: (0.05, 0.1)}),
}

SPEC = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=110,  # not a multiple of 16
    hidden_size=96,
    intermediate_size=160,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=1024,
    layers=(LayerSpec(), LayerSpec()),
    ropes=(RopeTable(inv_freq=tuple(100.0 ** (-i / 8) for i in range(8))),),
    attention_scale=0.25,
)
WHOLE_BLOCKS = dataclasses.replace(  # of 256 numbers
    SPEC, hidden_size=256, intermediate_size=512, num_heads=16, num_kv_heads=4
)
# Between them, these use every field of the spec.
SPECS = {
    "llama": SPEC,
    "gemma": dataclasses.replace(
        SPEC,
        norm=Norm.RMS_ONE_PLUS,
        placement=NormPlacement.PRE_POST,
        qk_norm=QKNorm.PER_HEAD,
        activation=Activation.GELU_TANH,
        layers=(LayerSpec(window=7), LayerSpec(rope=1, window=290), LayerSpec(rope=1)),
        ropes=(*SPEC.ropes, RopeTable(inv_freq=(0.5, 0.1), scale=1.25)),
        attention_softcap=2.0,
        logit_softcap=3.0,
        embedding_multiplier=8.0,
    ),
    "olmo": dataclasses.replace(
        SPEC,
        placement=NormPlacement.POST,
        qk_norm=QKNorm.FULL,
        tied_head=False,
        residual_multiplier=0.5,
        logit_multiplier=0.25,
    ),
    "cohere": dataclasses.replace(
        SPEC,
        norm=Norm.LAYER,
        placement=NormPlacement.PARALLEL,
        activation=Activation.GELU,
        layers=(LayerSpec(window=40), LayerSpec(rope=None)),
        ropes=(dataclasses.replace(SPEC.ropes[0], interleaved=True),),
    ),
    "neox": dataclasses.replace(
        SPEC,
        norm=Norm.LAYER_ONE_PLUS,
        norm_bias=True,
        placement=NormPlacement.PARALLEL_TWO_NORMS,
        activation=Activation.RELU2,
        gated_mlp=False,
        mlp_bias=True,
        layers=(
            LayerSpec(),
            LayerSpec(temperature=QueryTemperature(scale=0.3, tokens=70, offset=0)),
        ),
    ),
    "apertus": dataclasses.replace(SPEC, activation=Activation.XIELU, gated_mlp=False),
    "sinks": dataclasses.replace(
        SPEC, attention_sinks=True, layers=(LayerSpec(window=20), LayerSpec())
    ),
    "mrope": dataclasses.replace(
        SPEC,
        ropes=(dataclasses.replace(SPEC.ropes[0], axes=(0, 0, 1, 2, 1, 2, 0, 1)),),
        deepstack=1,
    ),
    "biased norms, clipped": dataclasses.replace(
        SPEC,
        norm=Norm.LAYER,
        norm_bias=True,
        placement=NormPlacement.PRE_POST,
        qk_norm=QKNorm.PER_HEAD_AFTER_ROPE,
        qkv_clip=0.7,
        head_bias=True,
    ),
    "chunks": dataclasses.replace(
        SPEC,
        qk_norm=QKNorm.UNWEIGHTED_AFTER_ROPE,
        layers=(
            LayerSpec(window=90, is_chunked=True),
            LayerSpec(rope=None, temperature=QueryTemperature(scale=0.3, tokens=70)),
        ),
    ),
    "many heads per KV head": dataclasses.replace(SPEC, num_heads=53, num_kv_heads=1),
    "biases, odd sizes": dataclasses.replace(
        SPEC,
        hidden_size=50,
        intermediate_size=77,
        num_heads=5,
        num_kv_heads=1,
        head_dim=10,
        ropes=(RopeTable(inv_freq=(1.0, 0.3, 0.1)),),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
}

EXPERTS = MixtureSpec(num_experts=12, experts_per_token=3, intermediate_size=48)


def with_mixture(spec: DecoderSpec = SPEC, dense: int = 0, **fields: Any) -> DecoderSpec:
    """Return a decoder whose layers have mixtures, the first `dense` ones aside."""
    mixture = dataclasses.replace(EXPERTS, **fields)
    layers = [dataclasses.replace(layer, mixture=mixture) for layer in spec.layers]
    return dataclasses.replace(spec, layers=(*spec.layers[:dense], *layers[dense:]))


# Between them, these use every field of a mixture's spec.
MIXTURES = {
    "mixtral": with_mixture(num_experts=4, experts_per_token=2, intermediate_size=96),
    "qwen2_moe": with_mixture(normalized=False, shared_intermediate_size=80, shared_gate=True),
    "deepseek": with_mixture(
        dense=1,
        score=RouterScore.SIGMOID,
        weight_scale=2.5,
        selection_bias=True,
        num_groups=4,
        groups_per_token=2,
        shared_intermediate_size=48,
    ),
    "group-limited": with_mixture(
        normalized=False, num_groups=3, groups_per_token=1, group_score_experts=1
    ),
    "gpt_oss": with_mixture(
        dataclasses.replace(SPEC, hidden_size=50),
        intermediate_size=77,
        router_bias=True,
        expert_bias=True,
        clamp=0.7,
        swish_beta=1.702,
    ),
    "ernie": with_mixture(
        selection_bias=True,
        weight_sum_min=0.4,
        shared_intermediate_size=48,
        shared_bias=True,
    ),
    "phimoe": with_mixture(
        SPECS["biased norms, clipped"],
        score=RouterScore.SPARSEMIXER,
        experts_per_token=2,
        normalized=False,
        sparsemixer_eps=0.2,
    ),
    "llama4": with_mixture(
        SPECS["chunks"],
        score=RouterScore.SIGMOID,
        normalized=False,
        weighs_inputs=True,
        shared_intermediate_size=48,
    ),
    "parallel, one expert": with_mixture(
        SPECS["cohere"], experts_per_token=1, num_experts=5, expert_bias=True
    ),
}
FEW = {"hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "num_kv_heads": 1}
GEMMA4 = dataclasses.replace(
    SPECS["gemma"],
    **FEW,
    norm=Norm.RMS,
    norm_eps=1e-3,
    attention_softcap=None,
    value_norm=True,
    layer_scale=True,
    per_layer=PerLayerSpec(size=16, vocab_size=90),
    ropes=(RopeTable(inv_freq=(1.0, 0.3) + 10 * (0.0,)), *SPEC.ropes),
    layers=(
        LayerSpec(rope=1, window=5),
        LayerSpec(head_dim=24, num_kv_heads=2, has_values=False, is_causal=True),
        LayerSpec(rope=1, window=5, keys_of=0, intermediate_size=56),
        LayerSpec(head_dim=24, num_kv_heads=2, keys_of=1, is_causal=True),
    ),
)
# Between them, these use all that is around layers, and layers whose heads differ.
GEMMA_SPECS = {
    "gemma4": GEMMA4,
    "gemma4, experts": with_mixture(
        dataclasses.replace(GEMMA4, per_layer=None, layers=GEMMA4.layers[:2]),
        num_experts=3,
        experts_per_token=2,
        intermediate_size=24,
        shared_intermediate_size=48,
        own_norms=True,
        expert_scales=True,
    ),
    "gemma3n": dataclasses.replace(
        GEMMA4,
        layer_scale=False,
        altup=AltUpSpec(num_inputs=3, rank=8),
        ropes=SPEC.ropes,
        layers=(
            LayerSpec(window=5, gate_cut=0.4),
            LayerSpec(gate_cut=-0.3),
            LayerSpec(keys_of=1),
        ),
    ),
    "gemma3n, what is seen is not scaled": dataclasses.replace(
        GEMMA4,
        layer_scale=False,
        altup=AltUpSpec(num_inputs=2, rank=8, scales_output=False),
        ropes=SPEC.ropes,
        layers=(LayerSpec(),),
    ),
}
DELTA_NET = GatedDeltaNetSpec(
    num_key_heads=4, num_value_heads=12, key_dim=16, value_dim=40, kernel_size=4
)
MAMBA2 = Mamba2Spec(
    num_heads=6, head_dim=32, state_size=24, num_groups=2, kernel_size=4, norm_size=96
)
MAMBA = MambaSpec(channels=192, state_size=9, rank=7, kernel_size=4, norms=True)
# Between them, these use every mixer that has a state.
HYBRIDS = {
    "jamba": dataclasses.replace(
        SPEC, layers=(LayerSpec(mixer=MAMBA), LayerSpec(rope=None, mixture=EXPERTS))
    ),
    "mamba of odd sizes, with biases": dataclasses.replace(
        SPEC,
        hidden_size=50,
        layers=(
            LayerSpec(),
            LayerSpec(
                mixer=MambaSpec(
                    channels=150, state_size=5, rank=160, kernel_size=2, conv_bias=False, bias=True
                )
            ),
        ),
    ),
    "lfm2": dataclasses.replace(
        SPEC,
        qk_norm=QKNorm.PER_HEAD,
        layers=(
            LayerSpec(mixer=ShortConvSpec(channels=96, kernel_size=3)),
            LayerSpec(),
            LayerSpec(mixer=ShortConvSpec(channels=96, kernel_size=5)),
        ),
    ),
    "odd sizes, biases, parallel": dataclasses.replace(
        SPECS["cohere"],
        hidden_size=50,
        layers=(
            LayerSpec(window=40),
            LayerSpec(mixer=ShortConvSpec(channels=70, kernel_size=4, bias=True)),
        ),
    ),
    "mixture": with_mixture(
        dataclasses.replace(
            SPEC, layers=(LayerSpec(mixer=ShortConvSpec(channels=96, kernel_size=2)), LayerSpec())
        ),
        score=RouterScore.SIGMOID,
        selection_bias=True,
        weight_sum_eps=0.1,
    ),
    "qwen3_next": dataclasses.replace(
        SPECS["gemma"],
        attention_gate=True,
        layers=(
            LayerSpec(mixer=DELTA_NET),
            LayerSpec(),
            LayerSpec(mixer=dataclasses.replace(DELTA_NET, kernel_size=2)),
        ),
    ),
    "delta nets of odd sizes, with a convolution": dataclasses.replace(
        SPEC,
        hidden_size=50,
        attention_gate=True,
        qkv_bias=True,
        layers=(
            LayerSpec(
                mixer=GatedDeltaNetSpec(
                    num_key_heads=5, num_value_heads=5, key_dim=13, value_dim=7, kernel_size=5
                )
            ),
            LayerSpec(),
            LayerSpec(mixer=ShortConvSpec(channels=50, kernel_size=3)),
        ),
    ),
    "kimi": dataclasses.replace(
        SPEC,
        qk_norm=QKNorm.FULL,
        layers=(LayerSpec(mixer=dataclasses.replace(DELTA_NET, gate_rank=24)), LayerSpec()),
    ),
    "delta nets as llama.cpp orders them": dataclasses.replace(
        SPEC,
        layers=(LayerSpec(mixer=dataclasses.replace(DELTA_NET, is_tiled=True)), LayerSpec()),
    ),
    "mamba2": dataclasses.replace(
        SPEC,
        layers=(
            LayerSpec(mixer=MAMBA2),
            LayerSpec(),
            LayerSpec(
                mixer=dataclasses.replace(MAMBA2, norm_size=192, norm_before_gate=True),
                mixture=EXPERTS,
            ),
        ),
    ),
    "mamba2 of odd sizes, halves of layers": dataclasses.replace(
        SPEC,
        hidden_size=50,
        residual_multiplier=0.6,
        activation=Activation.RELU2,
        gated_mlp=False,
        mlp_bias=True,
        layers=(
            LayerSpec(has_mixer=False),
            LayerSpec(
                mixer=dataclasses.replace(
                    MAMBA2,
                    head_dim=11,
                    num_groups=3,
                    kernel_size=2,
                    conv_bias=False,
                    input_bias=True,
                    output_bias=True,
                    norm_size=0,
                ),
                has_mlp=False,
            ),
            LayerSpec(has_mlp=False),
            LayerSpec(
                has_mixer=False,
                mixture=dataclasses.replace(EXPERTS, shared_intermediate_size=48),
            ),
        ),
    ),
    "mamba2 beside attention": dataclasses.replace(
        SPEC,
        output_bias=True,
        gate_multiplier=0.8,
        mlp_multiplier=1.2,
        layers=(
            LayerSpec(
                mixer=dataclasses.replace(
                    MAMBA2, head_dim=80, norm_size=80, multipliers=(0.7, 1.5, 0.9, 1.2, 0.8)
                ),
                attention_beside=True,
                mixer_multiplier=0.7,
                attention_multiplier=1.3,
            ),
            LayerSpec(mixer=ShortConvSpec(channels=96, kernel_size=3)),
        ),
    ),
}


def with_latents(spec: DecoderSpec, latent: LatentAttentionSpec, **layer: Any) -> DecoderSpec:
    """Return a spec whose layers have latent attention."""
    dim = latent.query_dim
    inv_freq = tuple(10_000.0 ** (-2 * i / latent.rope_dim) for i in range(latent.rope_dim // 2))
    return dataclasses.replace(
        spec,
        num_kv_heads=1,
        head_dim=latent.latent_dim,
        attention_scale=dim**-0.5,
        layers=tuple(dataclasses.replace(own, mixer=latent, **layer) for own in spec.layers),
        ropes=(RopeTable(inv_freq=inv_freq, interleaved=True, scale=1.2),),
    )


LATENTS = {
    "deepseek": with_latents(
        dataclasses.replace(SPEC, num_heads=6),
        LatentAttentionSpec(query_rank=40, rank=64, nope_dim=24, rope_dim=16, value_dim=32),
    ),
    "plain queries, biases, one of many heads": with_latents(
        dataclasses.replace(SPEC, num_heads=34, output_bias=True),
        LatentAttentionSpec(
            query_rank=None, rank=32, nope_dim=33, rope_dim=16, value_dim=16, bias=True
        ),
        window=50,
        temperature=QueryTemperature(scale=0.3, tokens=8),
    ),
    "parallel, wide values, no RoPE": with_latents(
        dataclasses.replace(SPECS["cohere"], num_heads=3),
        LatentAttentionSpec(query_rank=20, rank=16, nope_dim=8, rope_dim=16, value_dim=48),
        rope=None,
    ),
}
NUM_STATES = 4 * (LENGTH + 1)  # a slot behind each position of four sequences


def stored(numbers: Floats, format: Format = Format.F32) -> StoredTensor:
    """Return an array as it would lie in a file; to bf16 it is cut, not rounded."""
    if format == Format.BF16:
        numbers = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return StoredTensor(format, numbers.shape, np.ascontiguousarray(numbers).reshape(-1).view("u1"))


def random_blocks(shape: tuple[int, ...], format: Format) -> StoredTensor:
    """Return a quantized matrix whose numbers are about as large as trained ones."""
    rng = np.random.default_rng(shape)
    numbers, nbytes, scales = (BLOCKS | DECODED)[format]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // numbers, nbytes), np.uint8)
    for start, (low, high) in scales.items():
        halves = rng.uniform(low, high, (len(blocks), 1)).astype("<f2")
        blocks[:, start : start + 2] = halves.view("u1")
    if format == Format.MXFP4:
        blocks[:, 0] = rng.integers(119, 124, len(blocks))  # exponents
    return StoredTensor(format, shape, blocks.reshape(-1))


def random_weights(spec: DecoderSpec, format: Format = Format.F32) -> Weights:
    """Return weights, matrices in `format`."""
    rng = np.random.default_rng(1)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        numbers = rng.standard_normal(shape, np.float32) * np.float32(0.15)
        if name.endswith("norm"):
            weights[name] = stored(numbers + np.float32(not is_one_plus(spec, name)))
        elif name.endswith(".rate"):
            weights[name] = stored(-np.exp(10 * numbers))
        elif name.endswith("decay"):
            weights[name] = stored(-np.abs(numbers))
        elif format in BLOCKS | DECODED and len(shape) == 2:
            weights[name] = random_blocks(shape, format)
        else:
            weights[name] = stored(numbers, format if len(shape) == 2 else Format.F32)
    return weights


def cpu(spec: DecoderSpec, weights: Weights | None = None, **options: Any) -> CpuExecutor:
    """Make an executor."""
    options = {"threads": 2, "num_pages": NUM_PAGES, "page_tokens": 16} | options
    return CpuExecutor(spec, random_weights(spec) if weights is None else weights, **options)


def text(sequence: int) -> list[int]:
    """Return the tokens of a sequence."""
    rng = np.random.default_rng(sequence)
    return [int(id) for id in rng.integers(0, SPEC.vocab_size, LENGTH)]


def batch(parts: Sequence[tuple[int, int, int]], page_tokens: int = 16) -> Batch:
    """Return tokens `start` to `stop` of some sequences, with the logits of all."""
    counts = [stop - start for _, start, stop in parts]
    pages = -(-LENGTH // page_tokens)
    table = np.random.default_rng(0).permutation(NUM_PAGES)[: 4 * pages].reshape(4, pages)
    return Batch(
        token_ids=np.concatenate([text(s)[a:b] for s, a, b in parts]).astype(np.int32),
        positions=np.concatenate([np.arange(a, b) for _, a, b in parts]).astype(np.int32),
        sequences=np.repeat([s for s, _, _ in parts], counts).astype(np.int32),
        page_table=table.astype(np.int32),
        logit_rows=np.arange(sum(counts), dtype=np.int32),
    )


def with_states(step: Batch) -> Batch:
    """Give the sequences of a batch the slots of their first and last positions."""
    state_in, state_out = np.full((2, len(step.page_table)), -1, np.int32)
    for sequence in np.unique(step.sequences):
        positions = step.positions[step.sequences == sequence]
        own = sequence * (LENGTH + 1)
        state_in[sequence] = own + positions[0] if positions[0] else -1
        state_out[sequence] = own + positions[-1] + 1
    return dataclasses.replace(step, state_in=state_in, state_out=state_out)


def with_images(step: Batch, spec: DecoderSpec, whole: bool = True) -> Batch:
    """Put images into a batch: their rows, positions in three parts, and what their tokens see."""
    rng = np.random.default_rng(5)
    embeds = rng.standard_normal((NUM_ROWS, spec.row_size), np.float32)
    embed_rows, last_seen = np.full(LENGTH, -1, np.int32), np.arange(LENGTH, dtype=np.int32)
    for first, last in IMAGES:
        embed_rows[first : last + 1] = rng.permutation(NUM_ROWS)[: last + 1 - first]
        last_seen[first : last + 1] = last
    positions = np.arange(LENGTH)[:, None] // np.array([1, 2, 3])
    return dataclasses.replace(
        step,
        embed_rows=embed_rows[step.positions],
        embeds=embeds,
        rope_positions=np.ascontiguousarray(positions[step.positions], np.int32),
        last_seen=last_seen[step.positions] if whole else None,
    )


def random_eagle(model: CpuExecutor, **options: Any) -> tuple[CpuExecutor, npt.NDArray[np.int64]]:
    """Have a layer of EAGLE-3 draft for a model; return it, and what its head knows.

    Args:
        options: of the layer's executor.
    """
    token_ids = np.arange(0, model.spec.vocab_size, 2)
    own = EagleSpec(tapped=(0, 1, 1), num_embedded=model.spec.vocab_size)
    layer = {"layers": model.spec.layers[:1], "num_mtp_layers": 1, "tied_head": False}
    spec = dataclasses.replace(model.spec, vocab_size=len(token_ids), eagle=own, **layer)
    drafter = CpuExecutor(spec, random_weights(spec), **options)
    model.be_drafted_by(drafter)
    return drafter, token_ids
