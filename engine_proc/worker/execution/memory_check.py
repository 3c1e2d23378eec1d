"""Checks, before weights are read, that a model, its KV cache and its steps fit into memory."""

import logging
from collections.abc import Sequence

from headrace.config.config import CPU_KV_BYTES
from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.worker.checkpoints.weights import Format, Weights
from headrace.engine_proc.worker.execution.cpu_executor import matrix_bytes
from headrace.engine_proc.worker.execution.held_matrices import (
    HeldFormat,
    WeightDtype,
    activation_bits,
    held_format,
)
from headrace.engine_proc.worker.models.eagle import EAGLE3
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    Mamba2Spec,
    MambaSpec,
    Mixer,
    MixtureSpec,
    NormPlacement,
    ShortConvSpec,
)
from headrace.engine_proc.worker.models.tower_memory import tower_memory
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.parallel.shard import shard_spec, shards
from headrace.errors import ConfigError
from headrace.system.machine import memory_limit

GIB = 1 << 30
NUM_TAPPED = 3  # of csrc/cpu/model.h: layers whose inputs EAGLE-3 reads

log = logging.getLogger(__name__)


def check_kv_cache(kv_bytes: int, memory_bytes: int) -> None:
    """Raise `ConfigError` if a KV cache that a flag asks for is larger than all there is."""
    if kv_bytes > max(memory_bytes, CPU_KV_BYTES):
        raise ConfigError(
            f"--kv-cache-memory-bytes {kv_bytes} is more than the {memory_bytes} bytes of memory "
            "that this machine, or the container, has for it; lower it"
        )


def check_host_tier(config: ExecutionConfig) -> None:
    """Raise `ConfigError` if a GPU's pages cannot be kept as the flags ask."""
    if config.kv_store is not None and not config.kv_store_bytes:
        raise ConfigError(
            f"--kv-store {config.kv_store}: pages of GPUs reach it through memory of the host; "
            "give that --kv-store-bytes, such as 4G"
        )
    memory_bytes = max(memory_limit() - config.reserved_bytes, 0)
    if config.kv_store_bytes > memory_bytes:
        raise ConfigError(
            f"--kv-store-bytes {config.kv_store_bytes} is pinned as a whole for GPUs, more than "
            f"the {memory_bytes} bytes of memory that this machine, or the container, has for it; "
            "lower it"
        )


def check_weights(
    config: ExecutionConfig,
    stages: Sequence[DecoderModel],
    dtype: WeightDtype,
    memory_bytes: int,
    kv_bytes: int | None = None,
    num_frames: int | None = None,
) -> None:
    """Raise `ConfigError` if weights do not fit beside a step, adapters and the KV cache of a flag.

    A KV cache of the default size takes memory as it fills, so it is only warned of.

    Args:
        stages: of the model; one is the model itself, the only one that takes adapters.
        kv_bytes: of a full KV cache on this machine; None is that of all workers.
        num_frames: of hidden states, on this machine; None is those between all stages.
    """
    if num_frames is None:
        num_frames = config.tp * (config.pp - 1) * config.pp  # of links: each has one for each step
    kv_bytes = config.cpu_kv_bytes if kv_bytes is None else kv_bytes
    taken = weights_of_all(config, stages, dtype)
    num_tokens = config.max_num_batched_tokens
    step = steps_of_all(config, stages, num_tokens, num_frames)
    cache = 0 if config.kv_cache_memory_bytes is None else kv_bytes
    adapters = adapter_bytes(config, stages[0].spec, stages[0].weights)
    asked = cache + step + adapters
    if taken + asked <= memory_bytes:
        if taken + step + adapters + kv_bytes > memory_bytes:
            log.warning(
                "weights of %.1f GiB, a step of %d tokens (%.1f GiB)%s and a full KV cache of "
                "%.1f GiB are more than the %.1f GiB of memory; lower --kv-cache-memory-bytes",
                taken / GIB,
                num_tokens,
                step / GIB,
                f", {described(config, adapters)}" if adapters else "",
                kv_bytes / GIB,
                memory_bytes / GIB,
            )
        return
    beside = f" beside a step of {num_tokens} tokens ({step / GIB:.1f} GiB)"
    beside += f" and a KV cache of {cache / GIB:.1f} GiB" if cache else ""
    beside += f" and {described(config, adapters)}" if adapters else ""
    ways = [f"weights of at most {max(0, memory_bytes - asked) / GIB:.1f} GiB fit{beside}"]
    least_step = steps_of_all(config, stages, config.max_num_seqs, num_frames)
    if taken + cache + adapters + least_step <= memory_bytes:
        flag = "--max-model-len" if config.is_prefix_lm else "--max-num-batched-tokens"
        ways.append(f"with a lower {flag} they fit, too")
    if adapters and taken + cache + step < memory_bytes:
        ways.append("with a lower --max-cpu-loras, --max-loras or --max-lora-rank they fit, too")
    tower = tower_memory(config).held_bytes
    if tower and taken + asked <= memory_bytes + tower:
        ways.append(f"with --max-images 0 a vision tower of {tower / GIB:.1f} GiB is left out")
    in_int8 = weights_of_all(config, stages, WeightDtype.INT8)
    if in_int8 + asked <= memory_bytes:
        ways.append(f"with --quantization int8 they take {in_int8 / GIB:.1f} GiB")
    raise ConfigError(
        f"{config.model_path}: its weights take {taken / GIB:.1f} GiB, but the machine, or the "
        f"container, has {memory_bytes / GIB:.1f} GiB of memory for it: {', '.join(ways)}"
    )


def adapter_bytes(config: ExecutionConfig, spec: DecoderSpec, weights: Weights) -> int:
    """Return what all adapters that workers may hold take at most, but for whole embeddings.

    Each is reckoned as one of the highest rank, with a gain, of all matrices.
    """
    if not config.enable_lora:
        return 0
    rank, format = config.max_lora_rank, lora_format(config)
    shapes = [
        shape
        for shard in shards(spec, weights, config.tp)
        for name, shape in weight_shapes(shard_spec(spec, shard)).items()
        if len(shape) == 2 and "router" not in name.split(".")
    ]
    return config.max_loaded_loras * sum(
        matrix_bytes(format, (rank, cols)) + matrix_bytes(format, (rows, rank)) + 4 * rows
        for rows, cols in shapes
    )


def check_adapters(config: ExecutionConfig, weights: int, adapters: int, memory_bytes: int) -> None:
    """Raise `ConfigError` if adapters do not fit beside weights and the KV cache of a flag.

    Args:
        weights: bytes that they take, like `adapters`.
    """
    cache = config.kv_cache_memory_bytes or 0
    if weights + adapters + cache > memory_bytes:
        raise ConfigError(
            f"{config.model_path}: {described(config, adapters)} do not fit beside weights of "
            f"{weights / GIB:.1f} GiB and a KV cache of {cache / GIB:.1f} GiB: the machine, or the "
            f"container, has {memory_bytes / GIB:.1f} GiB of memory for it; lower --max-cpu-loras, "
            "--max-loras or --max-lora-rank"
        )


def described(config: ExecutionConfig, adapters: int) -> str:
    """Return what adapters of so many bytes are, for people."""
    count, rank = config.max_loaded_loras, config.max_lora_rank
    return f"{count} adapter{'s' * (count > 1)} of rank {rank} ({adapters / GIB:.1f} GiB)"


def lora_format(config: ExecutionConfig) -> Format:
    """Return how factors of adapters are held."""
    dtype = config.dtype if config.lora_dtype == "auto" else config.lora_dtype
    return Format.F32 if dtype == "float32" else Format.BF16


def steps_of_all(
    config: ExecutionConfig, stages: Sequence[DecoderModel], num_tokens: int, num_frames: int
) -> int:
    """Return what steps of so many tokens take at most: in each stage, and between two."""
    is_drafted = config.speculative == EAGLE3
    own = sum(step_bytes(stage.spec, num_tokens, is_drafted) for stage in stages)
    return own + num_frames * 4 * num_tokens * stages[0].spec.hidden_size


def step_bytes(spec: DecoderSpec, num_tokens: int, is_drafted: bool = False) -> int:
    """Return what the activations of a step take in the C++ core, at most.

    Most of it is a mixture's: each token has rows for each expert that it chooses. Buffers are
    those of csrc/cpu/step_state.cpp and mixture.cpp, rows as they are and rounded, and of
    products.cpp, rows in the order of tiles. A file may have matrices that meet bf16 and some that
    meet integers, so both are counted: 2 and 2.375 bytes a number.

    Args:
        is_drafted: EAGLE-3's layer drafts for the decoder, whose steps join hidden states.
    """
    kv_heads = [spec.kv_heads_of(layer) for layer in spec.layers]
    hidden, q = spec.hidden_size, spec.num_heads * max((dim for _, dim in kv_heads), default=0)
    kv = max((count * dim for count, dim in kv_heads), default=0)
    numbers = 3 * hidden + 3 * q + 2 * kv + max(hidden, q) + gemma_numbers(spec)
    numbers += max((mixer_numbers(layer.mixer) for layer in spec.layers), default=0)
    numbers += 3 * spec.hidden_size * max(2 * spec.num_mtp_layers, NUM_TAPPED * is_drafted)
    numbers += q if spec.attention_gate else 0
    if (latent := spec.latent) is not None:  # of heads: as they are, rounded, and queries
        of_head = max(latent.rank, latent.nope_dim)
        numbers += 3 * spec.num_heads * of_head + 2 * (latent.query_rank or 0)
    numbers += hidden if spec.placement == NormPlacement.PARALLEL_TWO_NORMS else 0
    mixtures = [layer.mixture for layer in spec.layers if layer.mixture is not None]
    if any(layer.has_dense_mlp for layer in spec.layers):
        numbers += 2 * max(spec.mlp_size_of(layer) for layer in spec.layers)
    numbers += max((pair_numbers(hidden, mixture) for mixture in mixtures), default=0)
    widths = [spec.mlp_size_of(layer) for layer in spec.layers if layer.has_dense_mlp]
    numbers += max(hidden, q, *widths) * 35 // 32
    return 4 * num_tokens * numbers


def gemma_numbers(spec: DecoderSpec) -> int:
    """Return the numbers that Gemma 3n and 4 compute around their layers for each token."""
    per_layer, altup = spec.per_layer, spec.altup
    numbers = 0
    if per_layer is not None:
        numbers += 2 * len(spec.layers) * per_layer.size + 2 * per_layer.size
    if altup is not None:
        numbers += (4 * altup.num_inputs + 1) * spec.hidden_size + 2 * altup.rank
    if any(layer.gate_cut is not None for layer in spec.layers):
        numbers += max(spec.mlp_size_of(layer) for layer in spec.layers)
    return numbers


def mixer_numbers(mixer: Mixer | None) -> int:
    """Return the numbers that a mixer with a state computes for each token."""
    match mixer:
        case ShortConvSpec():
            return 3 * mixer.channels
        case GatedDeltaNetSpec():
            of_gates = mixer.num_value_heads + mixer.num_decays + 6 * mixer.gate_rank
            return 4 * mixer.key_width + 5 * mixer.value_width + of_gates
        case Mamba2Spec():
            return 5 * mixer.inner_size + 4 * mixer.group_numbers + 2 * len(mixer.heads)
        case MambaSpec():
            return 5 * mixer.channels + mixer.rank + 2 * mixer.state_size
    return 0


def pair_numbers(hidden: int, mixture: MixtureSpec) -> int:
    """Return the numbers that a mixture computes for each token."""
    shared = mixture.shared_intermediate_size
    of_experts = mixture.experts_per_token * (3 * hidden + 2 * mixture.intermediate_size)
    return of_experts + (2 * shared + hidden if shared else 0)


def weights_of_all(
    config: ExecutionConfig, stages: Sequence[DecoderModel], dtype: WeightDtype
) -> int:
    """Return the least that the weights of all stages can take. Two may have a tied embedding."""
    rounds = config.dtype != "float32"
    return sum(core_bytes(stage.spec, stage.weights, dtype, rounds) for stage in stages)


def core_bytes(
    spec: DecoderSpec, weights: Weights, dtype: WeightDtype, rounds_activations: bool
) -> int:
    """Return the least that all weights can take in the C++ core."""
    is_rounded = activation_bits(dtype, rounds_activations) != 0
    return sum(
        least_bytes(held_format(name, weights[name], dtype, is_rounded), shape)
        if len(shape) == 2
        else 4 * shape[0]
        for name, shape in weight_shapes(spec).items()
    )


def least_bytes(format: HeldFormat, shape: tuple[int, ...]) -> int:
    """Return what a matrix takes at least: one of bf16 may take a quarter less."""
    nbytes = matrix_bytes(format, shape)
    return nbytes * 3 // 4 if format == Format.BF16 else nbytes
