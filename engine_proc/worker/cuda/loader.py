"""Loads a model, or a worker's share of it, onto a GPU; in Triton's interpreter, into memory."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor

from headrace.config.process_configs import ExecutionConfig, WorkerConfig
from headrace.engine_proc.collectives.collectives import Collectives
from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.shm.cache_memory import CacheMemory
from headrace.engine_proc.shm.page_memory import whole
from headrace.engine_proc.worker.adapters.adapter_opener import AdaptedModel
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.cuda_page_copier import CudaPageCopier
from headrace.engine_proc.worker.cuda.cuda_runner import CudaRunner
from headrace.engine_proc.worker.cuda.cuda_sampler import CudaSampler, DeviceHistories
from headrace.engine_proc.worker.cuda.device_memory import (
    FEWER_SEQUENCES,
    LESS_CACHE,
    SMALLER_STEP,
    SMALLER_WEIGHTS,
    DeviceMemory,
    TorchMemory,
    fitting,
    measure,
)
from headrace.engine_proc.worker.cuda.flashinfer_attention import FlashInferAttention, why_not
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes, buckets_of
from headrace.engine_proc.worker.cuda.graphs import CudaGraphs
from headrace.engine_proc.worker.cuda.kernels.e4m3_rows import E4M3
from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import has_fp8
from headrace.engine_proc.worker.cuda.kernels.linear import TILE_ROWS
from headrace.engine_proc.worker.cuda.kernels.numerics import INTERPRETED
from headrace.engine_proc.worker.cuda.largest_step import (
    fewest_sequences,
    largest_step,
    seen_whole,
)
from headrace.engine_proc.worker.cuda.matrices.adapted import AdapterRoom
from headrace.engine_proc.worker.cuda.matrices.cuda_adapters import CudaAdapters
from headrace.engine_proc.worker.cuda.memory_plan import check_bytes, check_split, split_room
from headrace.engine_proc.worker.cuda.phases import phases
from headrace.engine_proc.worker.cuda.pinned_memory import pin
from headrace.engine_proc.worker.execution.adapter_loader import AdapterLoader
from headrace.engine_proc.worker.execution.cache_fingerprint import cache_fingerprint
from headrace.engine_proc.worker.execution.cache_split import CacheSplit, split_alike, split_cache
from headrace.engine_proc.worker.execution.cpu_sampler import Masks
from headrace.engine_proc.worker.execution.embedder import Embedder
from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.execution.loaded_model import (
    PAGE_TOKENS,
    LoadedModel,
    Progress,
    threads_of_rank,
)
from headrace.engine_proc.worker.execution.memory_check import check_host_tier
from headrace.engine_proc.worker.execution.runner import EmbeddingRunner, Runner
from headrace.engine_proc.worker.models.compute_dtype import dtype_on_gpus
from headrace.engine_proc.worker.models.model import DecoderModel, config_with_images
from headrace.engine_proc.worker.parallel.host_peers import HostPeers
from headrace.engine_proc.worker.parallel.peers import Peers
from headrace.engine_proc.worker.parallel.shard import shards
from headrace.engine_proc.worker.parallel.tensor_parallel_group import open_group
from headrace.errors import ConfigError, ModelError
from headrace.ipc.worker_messages import SLOTS_LOOKING_AHEAD, SLOTS_PER_SEQUENCE, Step
from headrace.model.vision_families import sees_whole
from headrace.storage.checksum import digest_files

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_DTYPES = {"fp8": E4M3}  # others are those of the weights


def load_on_gpu(
    config: WorkerConfig,
    model: DecoderModel,
    progress: Progress,
    group: ShmAllReduce | None,
    embeds: Floats | None = None,
) -> LoadedModel:
    """Load a model that `devices.why_not_on_gpus` has nothing against.

    Args:
        group: through which workers on GPUs find each other, and interpreted ones sum.
        embeds: the embedding area, of a model that takes images.

    Raises:
        ConfigError: the GPU, or the host, has no room for what the flags ask for.
        ModelError: it has no 8-bit floats, and the flags ask for some.
    """
    execution = config.execution
    check_host_tier(execution)
    host = None if group is None else HostPeers(group)
    device = torch.device("cpu")
    if not INTERPRETED:
        device = torch.device("cuda", 0 if host is None else host.rank)
        torch.cuda.set_device(device)
    check_fp8(execution, device)
    dtype = dtype_on_gpus(execution, model)
    torch.set_num_threads(threads_of_rank(execution.tp))
    buckets = buckets_for(config, model)
    memory = TorchMemory(device) if device.type == "cuda" else None
    free_before = memory.free_and_total()[0] if memory else 0
    peers = None
    if group is not None and host is not None:
        parts = shards(model.spec, model.weights, group.num_ranks)
        peers = Peers(parts, collectives_of(config, group, host))
    with fitting("the weights", SMALLER_WEIGHTS):
        executor = CudaExecutor(
            model.spec,
            model.weights,
            num_pages=1,
            page_tokens=PAGE_TOKENS,
            device=device,
            dtype=DTYPES[dtype],
            quantization=execution.quantization,
            kv_dtype=KV_DTYPES.get(execution.kv_cache_dtype),
            kv_scales=model.kv_scales,
            largest=largest_sizes(execution, buckets),
            max_model_len=execution.max_model_len,
            peers=peers,
            adapters=adapter_room(execution),
            progress=part(progress, 0),
        )
        if execution.attention_backend == "flashinfer":
            executor.prompts = flashinfer_for(executor)
    with fitting("histories for penalties", FEWER_SEQUENCES):
        runner = runner_of(execution, executor, model, embeds)
    own_bytes = executor.page_bytes, executor.state_bytes
    split = fit_cache(config, own_bytes, runner, buckets, host, memory, free_before)
    with fitting(f"{split.num_pages} pages and the graphs", LESS_CACHE):
        executor.take_cache(*split)
        if memory is not None and len(buckets):
            around = nullcontext if peers is None else peers.group.capture
            executor.capture(buckets, CudaGraphs, around, part(progress, 1))
    is_generating = isinstance(runner, CudaRunner)
    adapters = None
    if execution.enable_lora:
        own = AdaptedModel.of(execution, model, None if peers is None else peers.shard)
        adapters = AdapterLoader(CudaAdapters(executor.adapter_parts, own))
    loaded = LoadedModel(
        runner,
        split.num_pages,
        num_states=split.num_states,
        looks_ahead=is_generating,
        adapters=adapters,
        can_rejoin=memory is None,
    )
    if not execution.kv_store_bytes or config.cache_fd is None:
        return loaded
    return with_host_tier(loaded, execution, executor, config.cache_fd, host)


def with_host_tier(
    loaded: LoadedModel,
    config: ExecutionConfig,
    executor: CudaExecutor,
    fd: int,
    host: HostPeers | None,
) -> LoadedModel:
    """Return a model whose pages and states are copied to memory of the host, and back.

    Args:
        fd: of that memory, which outlives this process.

    Raises:
        ConfigError: no page or state fits into it, no slot of the GPU is left to copies, or the
            driver does not pin it.
    """
    own_bytes = executor.page_bytes, executor.state_bytes
    split = host_split(config.kv_store_bytes, loaded, bytes_of_all(own_bytes, host))
    numerics = numerics_of(executor.device, config)
    num_bytes = whole(split.num_pages * own_bytes[0]) + split.num_states * own_bytes[1]
    memory = CacheMemory(fd, num_bytes, cache_fingerprint(config, split, numerics))
    if executor.device.type == "cuda":
        pin(memory.address, num_bytes, torch.cuda.cudart().cudaHostRegister)
    return replace(
        loaded,
        cache_id=memory.cache_id,
        page_bytes=own_bytes[0],
        state_bytes=own_bytes[1],
        num_host_pages=split.num_pages,
        num_host_states=split.num_states,
        numerics=numerics,
        copier=CudaPageCopier(executor.kv.groups, executor.states, memory, split),
    )


def bytes_of_all(own_bytes: tuple[int, int], host: HostPeers | None) -> tuple[int, int]:
    """Return the bytes of a page and of a state of all workers together."""
    page, state = (sum([own] if host is None else host.gather_number(own)) for own in own_bytes)
    return page, state


def host_split(num_bytes: int, loaded: LoadedModel, all_bytes: tuple[int, int]) -> CacheSplit:
    """Return how many pages and states of a model a host tier of so many bytes has.

    Args:
        all_bytes: of a page and of a state, of all workers together.

    Raises:
        ConfigError: there is no room for one of them, or copies have no slot on the GPU.
    """
    has_states = loaded.num_states > 0
    if has_states and loaded.num_states <= SLOTS_PER_SEQUENCE:
        raise ConfigError(
            f"--kv-store-bytes {num_bytes}: copies of states need a slot beside the "
            f"{loaded.num_states} that a sequence has, and the GPU has no more; raise "
            "--gpu-memory-utilization or --kv-cache-memory-bytes, or leave it out"
        )
    split = split_alike(CacheSplit(loaded.num_pages, loaded.num_states), *all_bytes, num_bytes)
    if not split.num_pages or (has_states and not split.num_states):
        beside = f" and a state of {all_bytes[1]}, in the proportion of the GPU's"
        raise ConfigError(
            f"--kv-store-bytes {num_bytes} has no room for a page of {all_bytes[0]} bytes"
            f"{beside if has_states else ''}; raise it"
        )
    return split


def numerics_of(device: torch.device, config: ExecutionConfig) -> str:
    """Return what decides about the bits of a GPU beside the model and the flags of its types.

    These are its generation, the compilers, our kernels, and which code attends and sums.
    """
    name = "interpreter"
    if device.type == "cuda":
        name = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    kernels = digest_files(sorted(Path(__file__).parent.rglob("*.py"))).hex()
    flags = config.attention_backend, config.disable_custom_all_reduce
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}, {kernels}, {flags}"


def adapter_room(config: ExecutionConfig) -> AdapterRoom | None:
    """Return how many adapters there is to be room for.

    Raises:
        ConfigError: the flags ask for factors of another type than products are of.
    """
    if not config.enable_lora:
        return None
    if config.lora_dtype not in ("auto", config.dtype):
        raise ConfigError(
            f"--lora-dtype {config.lora_dtype}: on GPUs factors are of the type of products; use "
            f"auto, or --dtype {config.lora_dtype}"
        )
    return AdapterRoom(config.max_loaded_loras, config.max_lora_rank)


def part(progress: Progress, index: int) -> Progress:
    """Return how one of two parts of loading makes itself known: weights, then graphs."""
    return lambda done, total: progress(index * total + done, 2 * total)


def buckets_for(config: WorkerConfig, model: DecoderModel) -> Buckets:
    """Return which steps are captured as graphs; none of an embedding model's."""
    execution = config.execution
    if execution.enforce_eager or model.pooling is not None:
        return Buckets(())
    return buckets_of(
        execution.max_num_seqs,
        execution.max_num_batched_tokens,
        execution.cudagraph_capture_sizes,
        config.num_drafts,
    )


def largest_sizes(config: ExecutionConfig, buckets: Buckets) -> Sizes:
    """Return the largest step, as far as it has tokens and sequences, and the most rows of any."""
    num_rows = max([config.max_num_seqs, *(sizes.num_rows for sizes in buckets)])
    return Sizes(config.max_num_batched_tokens, config.max_num_seqs, num_rows)


def check_fp8(config: ExecutionConfig, device: torch.device) -> None:
    """Raise `ModelError` if the flags require 8-bit floats that the GPU lacks."""
    if "fp8" in (config.quantization, config.kv_cache_dtype) and not has_fp8(device):
        name = torch.cuda.get_device_name(device)
        raise ModelError(f"--quantization and --kv-cache-dtype fp8 need Ada or newer, not {name}")


def flashinfer_for(executor: CudaExecutor) -> FlashInferAttention:
    """Return what attends to prompts with FlashInfer, as the flags ask.

    Raises:
        ModelError: it cannot; the text has the reason.
    """
    reason = why_not(executor.spec, executor.dtype, executor.kv_dtype)
    if not reason and importlib.util.find_spec("flashinfer") is None:
        reason = "the package flashinfer-python is missing"
    if reason:
        raise ModelError(f"--attention-backend flashinfer: {reason}; use triton")
    return FlashInferAttention(
        executor.spec,
        page_tokens=PAGE_TOKENS,
        device=executor.device,
        dtype=executor.dtype,
        library=importlib.import_module("flashinfer"),
    )


def collectives_of(
    config: WorkerConfig, group: ShmAllReduce, host: HostPeers
) -> Collectives[Tensor]:
    """Return what sums over the workers: kernels on GPUs, the host itself where it interprets."""
    if INTERPRETED:
        return group
    assert config.control_fd is not None
    return open_group(host, config.control_fd, config.execution.disable_custom_all_reduce)


def runner_of(
    config: ExecutionConfig, executor: CudaExecutor, model: DecoderModel, embeds: Floats | None
) -> Runner:
    """Return what makes vectors of an embedding model's tokens, and tokens of another's."""
    if model.pooling is not None:
        embedder = Embedder(executor, normalize=model.pooling.normalize, dense=model.dense)
        return EmbeddingRunner(embedder)
    histories = DeviceHistories(config.max_num_seqs, config.max_model_len, executor.device)
    sampler = CudaSampler(executor.device, executor.draws, histories)
    return CudaRunner(executor, sampler, phases(config.nvtx), embeds)


def fit_cache(
    config: WorkerConfig,
    own_bytes: tuple[int, int],
    runner: Runner,
    buckets: Buckets,
    host: HostPeers | None,
    memory: DeviceMemory | None,
    free_before: int,
) -> CacheSplit:
    """Return how many pages and states each worker has, the same numbers in each of them.

    The largest step is run first, for what it takes, and so that all is compiled.

    Args:
        own_bytes: of a page and of a state; 0 is a model without states.
        memory: None is the host's, of an interpreter.
        free_before: of it, when nothing was loaded.
    """
    execution = config.execution
    of_pages, of_states = bytes_of_all(own_bytes, host)
    max_num_seqs = execution.max_num_seqs
    of_flag = partial(
        split_cache,
        execution.cpu_kv_bytes,
        of_pages,
        of_states,
        max_num_seqs,
        SLOTS_LOOKING_AHEAD,
    )
    if memory is None:
        return of_flag()
    embeds = isinstance(runner, EmbeddingRunner)
    masks_of = partial(all_allowed, vocab_size=execution.vocab_size)
    has_whole = sees_ahead(execution)
    for what, warming in warming_steps(execution, embeds):
        with fitting(f"a step of {what}", SMALLER_STEP):
            runner.run(warming, masks_of)
            if has_whole:
                runner.run(seen_whole(warming), masks_of)
    step = largest_step_of(execution, embeds)
    run = partial(runner.run, step, masks_of)
    num_tokens = step.num_tokens
    sizes = [bucket.num_tokens for bucket in buckets]
    tower_bytes = config.tower_bytes
    figures = measure(memory, free_before, run, num_tokens, sizes, tower_bytes)
    if config.num_pages or execution.kv_cache_memory_bytes is not None:
        split = CacheSplit(config.num_pages, config.num_states)
        if not config.num_pages:
            split = of_flag()
        num_bytes = sum(count * own for count, own in zip(split, own_bytes, strict=True))
        check_bytes(num_bytes, figures.room(1.0), is_restart=config.num_pages > 0)
        return split
    share = execution.gpu_memory_utilization
    split = split_room(figures.room(share), *own_bytes, max_num_seqs)
    if host is not None:
        split = CacheSplit(*(min(host.gather_number(count)) for count in split))
    check_split(
        figures,
        share,
        split,
        state_bytes=own_bytes[1],
        page_tokens=PAGE_TOKENS,
        max_model_len=execution.max_model_len,
        max_num_seqs=max_num_seqs,
    )
    return split


def warming_steps(config: ExecutionConfig, embeds: bool) -> Iterator[tuple[str, Step]]:
    """Yield steps that have other kernels than the largest: no later one is to wait for those."""
    for num_tokens in (1, *TILE_ROWS):
        if num_tokens < config.max_num_batched_tokens:
            yield f"{num_tokens} tokens", largest_step_of(config, embeds, num_tokens)
    for num_sequences in fewest_sequences(  # whose tiles of attention are wider
        config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len
    ):
        prompts = largest_step_of(replace(config, max_num_seqs=num_sequences), embeds)
        yield f"{num_sequences} prompts", prompts


def sees_ahead(config: ExecutionConfig) -> bool:
    """Whether tokens of a prompt, or of an image, see later ones in a model."""
    if config.is_prefix_lm or not config.image_row_size:
        return config.is_prefix_lm
    return sees_whole(config_with_images(Path(config.model_path), config.mmproj))


def all_allowed(num_rows: int, vocab_size: int) -> Masks:
    """Return masks that forbid nothing."""
    return np.full((num_rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)


def largest_step_of(config: ExecutionConfig, embeds: bool, num_tokens: int | None = None) -> Step:
    """Return the largest step that the flags allow, or that has no more tokens than given."""
    return largest_step(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=num_tokens or config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        page_tokens=PAGE_TOKENS,
        embeds=embeds,
    )
