"""Loads a model, or a worker's shard of it, into its executor."""

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.config.process_configs import ExecutionConfig, WorkerConfig
from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.shm.cache_memory import CacheMemory
from headrace.engine_proc.shm.hidden_link import NUMBER_BYTES, HiddenLink
from headrace.engine_proc.shm.stage_links import StageLinks
from headrace.engine_proc.worker.adapters.adapter_opener import AdaptedModel
from headrace.engine_proc.worker.device_selection import (
    NAMES,
    falls_to_modules,
    lacking_kernel,
    place,
)
from headrace.engine_proc.worker.draft_opener import BY_MODELS, HeldDecoder, open_draft
from headrace.engine_proc.worker.encoder_arithmetic import arithmetic_of
from headrace.engine_proc.worker.execution.adapter_loader import AdapterLoader
from headrace.engine_proc.worker.execution.cache_fingerprint import cache_fingerprint
from headrace.engine_proc.worker.execution.cache_sizes import cache_bytes, page_bytes, state_bytes
from headrace.engine_proc.worker.execution.cache_split import split_cache
from headrace.engine_proc.worker.execution.cpu_adapters import CpuAdapters
from headrace.engine_proc.worker.execution.cpu_encoder import CpuEncoder, most_pages
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype
from headrace.engine_proc.worker.execution.cpu_sampler import MAX_THREADS, Sampler
from headrace.engine_proc.worker.execution.eagle_executor import EagleExecutor
from headrace.engine_proc.worker.execution.embedder import Embedder
from headrace.engine_proc.worker.execution.executor import Executor, Floats
from headrace.engine_proc.worker.execution.fitted_vocabulary import FittedVocabulary
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype
from headrace.engine_proc.worker.execution.loaded_model import (
    PAGE_TOKENS,
    LoadedModel,
    Progress,
    threads_of_rank,
)
from headrace.engine_proc.worker.execution.memory_check import (
    adapter_bytes,
    check_adapters,
    check_kv_cache,
    check_weights,
    lora_format,
)
from headrace.engine_proc.worker.execution.mtp_executor import MtpExecutor
from headrace.engine_proc.worker.execution.runner import EmbeddingRunner, GenerationRunner, Runner
from headrace.engine_proc.worker.model_opener import open_for, open_in_modules
from headrace.engine_proc.worker.models.dense_layers import DenseLayer, dense_modules
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.tower_memory import tower_memory
from headrace.engine_proc.worker.parallel.peers import Peers
from headrace.engine_proc.worker.parallel.shard import shard_spec, shards
from headrace.engine_proc.worker.stages.stage import PipelineStage, models_of, stages
from headrace.engine_proc.worker.stages.stage_runner import LastStage, StageRunner
from headrace.errors import ConfigError, ModelError
from headrace.ipc.curve_links import MAX_FRAME_BYTES
from headrace.model.pooling import Pooling
from headrace.system.machine import memory_limit

if TYPE_CHECKING:
    from headrace.engine_proc.worker.hf.adapted_layers import AdaptedLayers
    from headrace.engine_proc.worker.hf.classifier import Classifier
    from headrace.engine_proc.worker.hf.model import TransformersModel

ENCODER_PAGES = 1 << 16  # an encoder keeps nothing; its pages are numbers
# --dtype auto and float32 execute weights as they are stored, quantized blocks included; float32
# does so without rounding anything else, which is exact. The others multiply bf16 by bf16.
WEIGHTS = {
    "auto": WeightDtype.PACKED,
    "float32": WeightDtype.PACKED,
    "bfloat16": WeightDtype.BFLOAT16,
}
QUANTIZED = {
    "int8": WeightDtype.INT8,
    "int8_weight_only": WeightDtype.INT8_WEIGHT_ONLY,
}
KV = {
    "auto": KVDtype.BFLOAT16,  # half the memory, and faster
    "float32": KVDtype.FLOAT32,  # exact: greedy text equals transformers' in fp32
    "bfloat16": KVDtype.BFLOAT16,
}

log = logging.getLogger(__name__)


def load(
    config: WorkerConfig,
    progress: Progress,
    group: ShmAllReduce | None = None,
    embeds: Floats | None = None,
) -> LoadedModel:
    """Load the model that a worker runs; its share, if it is one of a group.

    Args:
        embeds: the embedding area, of a model that takes images.

    Raises:
        ConfigError: the machine is not what the flags need, or has less memory.
        ModelError: it cannot be loaded as the flags say; the text names file and reason.
    """
    execution = config.execution
    model = open_for(execution, group)
    if isinstance(model, DecoderModel) and falls_to_modules(execution, model):
        log.info(
            "no kernel of GPUs has %s; transformers' modules run it", lacking_kernel(model.spec)
        )
        model = open_in_modules(execution, group)
    if isinstance(model, DecoderModel):
        device = place(execution, model)
        log.info("%s runs on %s: %s", model.spec.architecture, NAMES[device.name], device.why)
        if model.spec.encoder is not None:
            refuse_adapters(execution, "is an encoder, which takes none")
            return encoder_in_core(execution, model, progress)
        if device.name == "cpu":
            return in_core(config, model, progress, group, embeds)
        refuse_draft(execution, NAMES[device.name])
        from headrace.engine_proc.worker.cuda.loader import load_on_gpu

        return load_on_gpu(config, model, progress, group, embeds)
    refuse_draft(execution, "transformers")
    if embeds is not None:
        raise ModelError(f"{execution.model_path}: takes images, which only our own code can")
    return in_transformers(config, model, group)


def refuse_draft(config: ExecutionConfig, where: str) -> None:
    """Raise `ConfigError` if the flags ask for a draft model, which only the C++ core runs."""
    if config.speculative in BY_MODELS:
        raise ConfigError(
            f"--speculative {config.speculative}: {config.model_path} runs on {where}, where no "
            "draft model does; use --speculative ngram"
        )


def refuse_adapters(config: ExecutionConfig, why: str) -> None:
    """Raise `ConfigError` if the flags ask for adapters; `why` goes on behind the model's name."""
    if config.enable_lora:
        raise ConfigError(
            f"--enable-lora: {config.model_path} {why}; merge the adapter into the weights"
        )


def free_memory(config: ExecutionConfig) -> int:
    """Return the memory that other models of the server and a vision tower leave at most."""
    others = config.reserved_bytes + tower_memory(config).held_bytes
    return max(memory_limit() - others, 0)


def in_core(
    worker: WorkerConfig,
    model: DecoderModel,
    progress: Progress,
    group: ShmAllReduce | None,
    embeds: Floats | None,
) -> LoadedModel:
    """Load a model into the C++ core, and the draft model beside it."""
    config = worker.execution
    weight_dtype = QUANTIZED.get(config.quantization) or WEIGHTS[config.dtype]
    free = free_memory(config)
    check_memory(worker, model, weight_dtype, free)
    draft = open_draft(config, model, weight_dtype, free)
    decoders = [HeldDecoder(model, weight_dtype)]
    if draft is not None:
        decoders.append(draft)
    kv_dtype = KV[config.kv_cache_dtype]
    peers = [share(decoder.model, group) for decoder in decoders]
    with_pages = [
        share_specs(decoder.model.spec, its_peers) * (config.tp if its_peers is None else 1)
        for decoder, its_peers in zip(decoders, peers, strict=True)
        if decoder.has_pages
    ]
    split = split_cache(
        config.cpu_kv_bytes,
        sum(page_bytes(own, PAGE_TOKENS, kv_dtype) for specs in with_pages for own in specs),
        sum(map(state_bytes, with_pages[0])),
        config.max_num_seqs,
    )
    rank = 0 if group is None else group.rank
    own_specs = [specs[rank] for specs in with_pages]
    stage = None
    if config.pp > 1:
        stage = stages(model.spec, config.pp)[worker.stage]
        own_specs = [stage.spec_of(own_specs[0])]
        decoders = [HeldDecoder(stage.model_of(model), weight_dtype)]
        peers = [stage.peers_of(peers[0])]
    sizes = [cache_bytes(spec, *split, PAGE_TOKENS, kv_dtype) for spec in own_specs]
    memory = None
    if worker.cache_fd is not None:
        memory = CacheMemory(worker.cache_fd, sum(sizes), cache_fingerprint(config, split))
    num_threads = threads_of_rank(config.num_local_workers)
    executors = [
        CpuExecutor(
            decoder.model.spec,
            decoder.model.weights,
            num_pages=split.num_pages,
            num_states=split.num_states,
            page_tokens=PAGE_TOKENS,
            weight_dtype=decoder.dtype,
            kv_dtype=kv_dtype,
            rounds_activations=config.dtype != "float32",
            threads=num_threads,
            peers=peers[place],
            progress=progress,
            memory=memory,
            memory_start=sum(sizes[:place]) if decoder.has_pages else 0,
        )
        for place, decoder in enumerate(decoders)
    ]
    links = None if stage is None else open_links(worker, model.spec.hidden_size)
    drafter = drafter_of(decoders, executors)
    runner = core_runner(config, executors[0], model, stage, links, embeds, drafter)
    cache_id = b"" if memory is None else memory.cache_id
    adapters = core_adapters(config, executors[0], model, peers[0]) if config.enable_lora else None
    bytes_of_pages = [page_bytes(spec, PAGE_TOKENS, kv_dtype) for spec in own_specs]
    is_eagle = draft is not None and draft.token_ids is not None
    return LoadedModel(
        runner,
        split.num_pages,
        num_states=split.num_states,
        cache_id=cache_id,
        page_bytes=bytes_of_pages[0],
        state_bytes=state_bytes(own_specs[0]),
        eagle_bytes=bytes_of_pages[1] if is_eagle else 0,
        adapters=adapters,
        links=links,
        hidden_size=0 if links is None else model.spec.hidden_size,
        rest=partial(rest_all, executors),
    )


def check_memory(worker: WorkerConfig, model: DecoderModel, dtype: WeightDtype, free: int) -> None:
    """Check that this machine has memory for a model and its KV cache, or for its stage of them.

    Raises:
        ConfigError: it has not.
    """
    config, parts = worker.execution, models_of(model, worker.execution.pp)
    kv_bytes = config.cpu_kv_bytes
    num_frames: int | None = None
    if config.has_remote_stages:
        check_frames(config.max_num_batched_tokens, model.spec.hidden_size)
        num_links = (worker.stage > 0) + (worker.stage < config.pp - 1)
        num_frames = num_links * config.pp * 2  # each in a link, and once more on its way
        parts = [parts[worker.stage]]
        kv_bytes = kv_bytes * len(parts[0].spec.layers) // len(model.spec.layers)
    check_kv_cache(kv_bytes, free)
    check_weights(config, parts, dtype, free, kv_bytes, num_frames)


def check_frames(num_tokens: int, hidden_size: int) -> None:
    """Check that the hidden states of a step of so many tokens can go to another machine.

    Raises:
        ConfigError: they are too many.
    """
    most = MAX_FRAME_BYTES // (NUMBER_BYTES * hidden_size)
    if num_tokens > most:
        raise ConfigError(
            f"--max-num-batched-tokens {num_tokens}: links between machines take the hidden states "
            f"of {most} tokens at most, {hidden_size} numbers each; lower it to {most}"
        )


def open_links(worker: WorkerConfig, hidden_size: int) -> StageLinks:
    """Return the links of a worker to its neighbors in other stages."""
    num_frames, max_rows = worker.execution.pp, worker.execution.max_num_batched_tokens
    before, after = (
        None if fd is None else HiddenLink(fd, num_frames, max_rows, hidden_size)
        for fd in (worker.before_fd, worker.after_fd)
    )
    return StageLinks(before, after)


def core_runner(
    config: ExecutionConfig,
    executor: CpuExecutor,
    model: DecoderModel,
    stage: PipelineStage | None,
    links: StageLinks | None,
    embeds: Floats | None,
    drafter: Executor | None,
) -> Runner:
    """Return what runs the steps of the C++ core: a stage's, or those of all layers."""
    own: Executor = executor
    if stage is not None and links is not None:
        if not stage.is_last:
            return StageRunner(executor, links)
        own = LastStage(executor, links)
    num_threads = threads_of_rank(config.num_local_workers)
    size = model.spec.vocab_size
    return decoder_runner(own, model.pooling, model.dense, size, num_threads, embeds, drafter)


def rest_all(executors: Iterable[CpuExecutor]) -> None:
    """Have executors give back what steps take."""
    for executor in executors:
        executor.rest()


def core_adapters(
    config: ExecutionConfig,
    executor: CpuExecutor,
    model: DecoderModel,
    peers: Peers[ShmAllReduce] | None,
) -> AdapterLoader:
    """Return what loads adapters into the C++ core."""
    own = AdaptedModel.of(config, model, None if peers is None else peers.shard)
    max_bytes = adapter_bytes(config, model.spec, model.weights)
    return AdapterLoader(CpuAdapters(executor, own, lora_format(config)), max_bytes)


def drafter_of(decoders: list[HeldDecoder], executors: list[CpuExecutor]) -> Executor | None:
    """Return what drafts for the first of the decoders, if there is something."""
    spec = decoders[0].model.spec
    if spec.num_mtp_layers:
        return MtpExecutor(executors[0])
    if len(executors) == 1:
        return None
    token_ids = decoders[1].token_ids
    if token_ids is None:
        return executors[1]
    executors[0].be_drafted_by(executors[1])
    return EagleExecutor(executors[1], token_ids, spec.vocab_size)


def share(model: DecoderModel, group: ShmAllReduce | None) -> Peers[ShmAllReduce] | None:
    """Return the workers that have the shares of a model, if there are several.

    EAGLE-3's layer is whole in each of them.
    """
    if group is None or model.spec.eagle is not None:
        return None
    return Peers(shards(model.spec, model.weights, group.num_ranks), group)


def encoder_in_core(
    config: ExecutionConfig, model: DecoderModel, progress: Progress
) -> LoadedModel:
    """Load an encoder into the C++ core.

    By default its layers are multiplied as suits the machine (`encoder_arithmetic.py`).
    """
    assert model.pooling is not None
    of_flags = QUANTIZED.get(config.quantization) or WEIGHTS[config.dtype]
    arithmetic = arithmetic_of(config, of_flags, model)
    weight_dtype, is_exact = arithmetic.weight_dtype, arithmetic.is_exact
    if weight_dtype is not of_flags:
        log.info("layers are multiplied in %s; --dtype float32 rounds nothing", arithmetic.name)
    check_weights(config, [model], weight_dtype, free_memory(config))
    num_tokens = max(config.max_num_batched_tokens, config.max_model_len)
    executor = CpuExecutor(
        model.spec,
        model.weights,
        num_pages=most_pages(num_tokens, config.max_num_seqs, PAGE_TOKENS),
        page_tokens=PAGE_TOKENS,
        weight_dtype=weight_dtype,
        kv_dtype=KVDtype.FLOAT32 if is_exact else KVDtype.BFLOAT16,
        rounds_activations=not is_exact,
        threads=threads_of_rank(config.tp),
        progress=progress,
    )
    encoder = CpuEncoder(executor, model.pooling.kind)
    embedder = Embedder(encoder, normalize=model.pooling.normalize, dense=model.dense)
    return LoadedModel(EmbeddingRunner(embedder), ENCODER_PAGES, whole_prompts=True)


def share_specs(spec: DecoderSpec, peers: Peers[ShmAllReduce] | None) -> list[DecoderSpec]:
    """Return the shares of all workers: the same list in each of them."""
    return [spec] if peers is None else [shard_spec(spec, shard) for shard in peers.shards]


def sum_over(group: ShmAllReduce | None, number: int) -> int:
    """Return the sum of all workers' numbers."""
    if group is None:
        return number
    numbers = np.empty(group.num_ranks, np.int64)
    group.all_gather(np.array([number], np.int64), numbers)
    return int(numbers.sum())


def in_transformers(
    worker: WorkerConfig, model: "TransformersModel | Classifier", group: ShmAllReduce | None
) -> LoadedModel:
    """Run a model in its own modules. Only here is torch loaded for CPUs."""
    from headrace.engine_proc.worker.hf.classifier import Classifier
    from headrace.engine_proc.worker.hf.encoder_executor import EncoderExecutor
    from headrace.engine_proc.worker.hf.executor import TransformersExecutor

    config, on_gpu = worker.execution, model.module.device.type == "cuda"
    if config.quantization != "none":
        raise ModelError(
            f"{config.model_path}: runs in transformers, which cannot do --quantization "
            f"{config.quantization}"
        )
    if isinstance(model, Classifier):
        refuse_adapters(config, "is a cross-encoder, which takes none")
        embedder = Embedder(model, normalize=False)
        return LoadedModel(EmbeddingRunner(embedder), ENCODER_PAGES, whole_prompts=True)
    pooling = model.pooling
    dense: tuple[DenseLayer, ...] = ()
    if pooling is not None:
        width: int = model.module.config.get_text_config().hidden_size
        dense = dense_modules(Path(config.model_path), pooling, width)
    if pooling is not None and not model.is_causal:
        refuse_adapters(config, "is an encoder, which takes none")
        encoder = EncoderExecutor(model, pooling.kind)
        embedder = Embedder(encoder, normalize=pooling.normalize, dense=dense)
        return LoadedModel(EmbeddingRunner(embedder), ENCODER_PAGES, whole_prompts=True)
    if not on_gpu:
        check_kv_cache(config.cpu_kv_bytes, free_memory(config))
    own_dtypes = KV | {"auto": model.dtype, "float16": "float16"}  # of GPUs
    kv_dtype = (own_dtypes if on_gpu else KV)[config.kv_cache_dtype]
    own_bytes = model.page_bytes(PAGE_TOKENS, kv_dtype)
    layers = None
    if config.enable_lora:
        if on_gpu:
            refuse_adapters(config, "runs in transformers on a GPU, where it takes none")
        layers = adapted_layers(config, model)
    executor = TransformersExecutor(
        model, num_pages=1, page_tokens=PAGE_TOKENS, kv_dtype=kv_dtype, adapters=layers
    )
    num_threads = threads_of_rank(config.tp)
    runner = decoder_runner(executor, pooling, dense, model.vocab_size, num_threads)
    num_pages = config.cpu_kv_bytes // sum_over(group, own_bytes)
    if on_gpu:
        num_pages = pages_on_gpu(worker, own_bytes, runner)
    executor.take_pages(num_pages)
    adapters = None
    if layers is not None:
        adapters = AdapterLoader(layers, bytes_in_layers(config, layers))
    return LoadedModel(runner, num_pages, adapters=adapters)


def adapted_layers(config: ExecutionConfig, model: "TransformersModel") -> "AdaptedLayers":
    """Return the layers of transformers' modules that adapters may change.

    Raises:
        ConfigError: they are spread over several workers, or memory lacks.
    """
    from headrace.engine_proc.worker.hf.adapted_layers import AdaptedLayers
    from headrace.engine_proc.worker.hf.model import DTYPES

    if config.tp > 1:
        refuse_adapters(config, "runs in transformers, where adapters need --tp 1")
    layers = AdaptedLayers(model, config.max_lora_rank, DTYPES.get(config.lora_dtype))
    weights = sum(parameter.nbytes for parameter in model.module.parameters())
    check_adapters(config, weights, bytes_in_layers(config, layers), free_memory(config))
    return layers


def bytes_in_layers(config: ExecutionConfig, layers: "AdaptedLayers") -> int:
    """Return what all adapters take in transformers' modules at most."""
    return config.max_loaded_loras * layers.bytes_of(config.max_lora_rank)


def pages_on_gpu(config: WorkerConfig, own_bytes: int, runner: Runner) -> int:
    """Return how many pages of so many bytes there are beside a model that is on the GPU."""
    from headrace.engine_proc.worker.cuda.device_memory import TorchMemory
    from headrace.engine_proc.worker.cuda.graph_sizes import Buckets
    from headrace.engine_proc.worker.cuda.loader import fit_cache

    memory = TorchMemory()
    free_before = memory.free_and_total()[0] + memory.held()
    split = fit_cache(config, (own_bytes, 0), runner, Buckets(()), None, memory, free_before)
    return split.num_pages


def decoder_runner(
    executor: Executor,
    pooling: Pooling | None,
    dense: tuple[DenseLayer, ...],
    vocab_size: int,
    num_threads: int,
    embeds: Floats | None = None,
    draft_model: Executor | None = None,
) -> Runner:
    """Return what makes vectors of an embedding model's tokens, and tokens of another's."""
    if pooling is not None:
        return EmbeddingRunner(Embedder(executor, normalize=pooling.normalize, dense=dense))
    sampler = Sampler(vocab_size, threads=min(num_threads, MAX_THREADS))
    if draft_model is not None:
        draft_model = FittedVocabulary(draft_model, vocab_size)
    return GenerationRunner(executor, sampler, embeds, draft_model)
