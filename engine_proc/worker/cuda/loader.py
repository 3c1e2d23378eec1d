"""Loads a model, or a worker's share of it, onto a GPU; in Triton's interpreter, into memory."""

import importlib
import importlib.util
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.config.process_configs import ExecutionConfig, WorkerConfig
from headrace.engine_proc.collectives.collectives import Collectives
from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.cuda_runner import CudaRunner
from headrace.engine_proc.worker.cuda.cuda_sampler import CudaSampler
from headrace.engine_proc.worker.cuda.device_memory import (
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
from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import has_fp8
from headrace.engine_proc.worker.cuda.kernels.linear import TILE_ROWS
from headrace.engine_proc.worker.cuda.kernels.numerics import INTERPRETED
from headrace.engine_proc.worker.cuda.largest_step import largest_step
from headrace.engine_proc.worker.cuda.matrices.fp8 import E4M3
from headrace.engine_proc.worker.cuda.memory_plan import check_bytes, check_pages
from headrace.engine_proc.worker.cuda.phases import phases
from headrace.engine_proc.worker.execution.cpu_sampler import MAX_THREADS, Masks, Sampler
from headrace.engine_proc.worker.execution.embedder import Embedder
from headrace.engine_proc.worker.execution.executor import Floats
from headrace.engine_proc.worker.execution.loaded_model import (
    PAGE_TOKENS,
    LoadedModel,
    Progress,
    threads_of_rank,
)
from headrace.engine_proc.worker.execution.runner import EmbeddingRunner, Runner
from headrace.engine_proc.worker.models.compute_dtype import dtype_on_gpus
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.parallel.host_peers import HostPeers
from headrace.engine_proc.worker.parallel.peers import Peers
from headrace.engine_proc.worker.parallel.shard import shards
from headrace.engine_proc.worker.parallel.tensor_parallel_group import open_group
from headrace.errors import ModelError
from headrace.ipc.worker_messages import Step

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
        ConfigError: the GPU has no room for one sequence, or for what the flags ask for.
        ModelError: it has no 8-bit floats, and the flags ask for some.
    """
    execution = config.execution
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
            progress=part(progress, 0),
        )
        if execution.attention_backend == "flashinfer":
            executor.prompts = flashinfer_for(executor)
    runner = runner_of(execution, executor, model, embeds)
    num_pages = count_pages(config, executor, runner, buckets, host, memory, free_before)
    with fitting(f"{num_pages} pages and the graphs", LESS_CACHE):
        executor.take_pages(num_pages)
        if memory is not None and len(buckets):
            around = nullcontext if peers is None else peers.group.capture
            executor.capture(buckets, CudaGraphs, around, part(progress, 1))
    is_generating = isinstance(runner, CudaRunner)
    return LoadedModel(runner, num_pages, looks_ahead=is_generating, can_rejoin=memory is None)


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
    num_threads = min(threads_of_rank(config.tp), MAX_THREADS)
    on_host = Sampler(model.spec.vocab_size, threads=num_threads)
    sampler = CudaSampler(executor.device, on_host, executor.draws)
    return CudaRunner(executor, sampler, phases(config.nvtx), embeds)


def count_pages(
    config: WorkerConfig,
    executor: CudaExecutor,
    runner: Runner,
    buckets: Buckets,
    host: HostPeers | None,
    memory: DeviceMemory | None,
    free_before: int,
) -> int:
    """Return how many KV pages each worker has, the same number in each of them.

    The largest step is run first, for what it takes, and so that all is compiled.

    Args:
        memory: None is the host's, of an interpreter.
        free_before: of it, when nothing was loaded.
    """
    execution = config.execution
    own_bytes = executor.page_bytes
    all_bytes = [own_bytes] if host is None else host.gather_number(own_bytes)
    if memory is None:
        return execution.cpu_kv_bytes // sum(all_bytes)
    embeds = isinstance(runner, EmbeddingRunner)
    masks_of = partial(all_allowed, vocab_size=execution.vocab_size)
    for num_tokens in (1, *TILE_ROWS):  # they are other kernels, and no step is to wait for those
        if num_tokens < execution.max_num_batched_tokens:
            with fitting(f"a step of {num_tokens} tokens", SMALLER_STEP):
                runner.run(largest_step_of(execution, embeds, num_tokens), masks_of)
    step = largest_step_of(execution, embeds)
    run = partial(runner.run, step, masks_of)
    num_tokens = step.num_tokens
    sizes = [bucket.num_tokens for bucket in buckets]
    tower_bytes = config.tower_bytes
    figures = measure(memory, free_before, run, num_tokens, sizes, tower_bytes)
    if config.num_pages or execution.kv_cache_memory_bytes is not None:
        num_pages = config.num_pages or (execution.kv_cache_memory_bytes or 0) // sum(all_bytes)
        check_bytes(num_pages * own_bytes, figures.room(1.0), is_restart=config.num_pages > 0)
        return num_pages
    share = execution.gpu_memory_utilization
    num_pages = figures.room(share) // own_bytes
    num_pages = num_pages if host is None else min(host.gather_number(num_pages))
    check_pages(
        figures,
        share,
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        max_model_len=execution.max_model_len,
    )
    return num_pages


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
