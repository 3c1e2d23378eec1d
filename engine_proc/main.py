"""Engine process: token ids in, token ids out, one step after the other.
In: ToEngine (tokenizer_proc, frontend, detokenizer_proc).  Out: ToWorker, ToDetokenizer."""

import logging
import math
import pkgutil
import time
from collections.abc import Callable
from secrets import token_bytes
from typing import TYPE_CHECKING, NoReturn

from headrace.board.admin_requests import RESET_ENCODER_CACHE, AdminRequests
from headrace.board.backlog import engine_backlog
from headrace.board.board import Slot
from headrace.board.fields import EngineField, Seating
from headrace.config.config import CPU_KV_BYTES
from headrace.config.process_configs import EngineConfig, StoreTiers
from headrace.engine_proc.adapter_loads import AdapterLoads
from headrace.engine_proc.child_processes.store_client import StoreClient
from headrace.engine_proc.child_processes.vision_client import VisionClient, num_area_rows
from headrace.engine_proc.child_processes.worker_group import WorkerGroup
from headrace.engine_proc.engine_core import EngineCore
from headrace.engine_proc.gateway.links import detokenizer_links, listen
from headrace.engine_proc.grammars import MatcherQueue
from headrace.engine_proc.images.encoder_cache import EncoderCache
from headrace.engine_proc.images.encoder_queue import EncoderQueue
from headrace.engine_proc.kv_cache.cache_table import CacheTable, table_bytes
from headrace.engine_proc.kv_cache.host_tier import COPY_SLOTS, CachePools, HostTier
from headrace.engine_proc.kv_cache.kv_event_log import KvEventLog
from headrace.engine_proc.kv_cache.page_fetcher import PageFetcher
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.page_copies import PageCopies
from headrace.engine_proc.request_io.kv_event_publisher import KvEventPublisher
from headrace.engine_proc.request_io.turn import EngineInbox
from headrace.engine_proc.scheduling.adapter_pool import AdapterPool
from headrace.engine_proc.scheduling.draft_model import DraftModel
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.scheduling.speculation import Speculation
from headrace.engine_proc.scheduling.waiting_queue import Policy
from headrace.engine_proc.shm.cache_memory import map_tables
from headrace.engine_proc.shm.embedding_area import EmbeddingArea
from headrace.engine_proc.sleeper import Sleeper
from headrace.errors import ConfigError
from headrace.ipc.adapter_registry import AdapterRegistry
from headrace.ipc.arena import Arena
from headrace.ipc.prefix_index import PrefixIndex
from headrace.ipc.sockets import deliver
from headrace.ipc.worker_messages import CacheLayout, OpenStore, WorkerReady
from headrace.runtime.process import Context
from headrace.system.cpu_share import take_share
from headrace.system.machine import kernels_number

if TYPE_CHECKING:
    from headrace.model.grammar_compiler import GrammarCompiler

LAST_MS = 2000  # for the last outputs of an engine that leaves to reach their detokenizers
SHORT_STEP_S = 0.004  # longer steps gain nothing ahead, and a new request waits for two

# By name: an engine with workers loads none of them.
MOCK = "headrace.engine_proc.mock.main:main"
REMOTE = "headrace.engine_proc.remote.main:main"

log = logging.getLogger(__name__)


def main(config: EngineConfig, context: Context) -> NoReturn:
    """Run the engine that the config names until SIGTERM, or until workers die one by one."""
    run: Callable[[EngineConfig, Context], NoReturn]
    if config.remote is not None:
        run = pkgutil.resolve_name(REMOTE)
    else:
        run = pkgutil.resolve_name(MOCK) if config.engine == "mock" else run_with_workers
    try:
        run(config, context)
    finally:
        if context.slot[EngineField.SEATING] == Seating.VACANT:
            deliver(LAST_MS)


def run_with_workers(config: EngineConfig, context: Context) -> NoReturn:
    """Run the engine whose workers compute a model."""
    if config.num_replicas > 1:
        take_share(config.replica, config.num_replicas)
    inbox = listen(config, context)
    grammars = make_grammars(config)
    arena, area, vision, workers, store = None, None, None, None, None
    publisher, tower_bytes = KvEventPublisher(), 0
    if config.arena_fd is not None:
        arena = Arena(config.arena_fd, config.num_arena_regions)
        area = EmbeddingArea.create(num_area_rows(config), config.execution.image_row_size)
    resets = AdminRequests(context.board, (RESET_ENCODER_CACHE,))
    images = make_images(config, arena, lambda: token_bytes(16) if resets.take() else None)
    try:
        if arena is not None and area is not None and images is not None:
            vision = VisionClient(config, context, arena, area)
            tower_bytes = vision.wait_gpu_bytes(images)
        if config.store_tiers is not None:
            store = StoreClient(config, context)
        workers = WorkerGroup(config, context, area, tower_bytes)
        ready = workers.wait_ready()
        context.slot[EngineField.KERNELS] = kernels_number(workers.gpus)
        tables = open_tables(config, ready, workers.cache_id)
        pools = make_pools(ready, config, tables)
        pool = pools.pages
        tier = make_host_tier(pools, ready, workers, tables, store, config.store_tiers)
        publisher = publish_events(config, pool)
        adapter_pool = make_adapters(config)
        scheduler = make_scheduler(
            pool, ready, config, images, pools.slots, adapter_pool, store, tier
        )
        detokenizers = detokenizer_links(config, context, inbox)
        prompts = engine_backlog(context.board, context.index)
        prompts.settle()
        engine = EngineCore(
            config,
            scheduler,
            pool,
            detokenizers,
            context.slot,
            grammars,
            images,
            vision,
            list(context.board.of("frontend")),
            prompts=prompts,
            ahead_s=ahead_s(config, ready),
            store=store,
            adapters=make_adapter_loads(config, adapter_pool, scheduler, context.index),
            copies=None if tier is None else make_copies(tier, context),
        )
        if tier is not None:
            tier.open(engine.prompt_s, engine.step_s)
        if store is not None:
            open_store(store, workers, engine, pools, tier)
        grammars.wait_loaded(context.slot.beat)
        sleeper = Sleeper(context, scheduler, workers, store, pages_to_give_back(config, workers))
        context.ready()
        serve(engine, workers, inbox, publisher, sleeper, context.slot)
    finally:
        inbox.close()
        publisher.close()
        if store is not None:
            store.drain()
        if workers is not None:
            workers.stop()
        if vision is not None:
            vision.stop()


def serve(
    engine: EngineCore,
    workers: WorkerGroup,
    inbox: EngineInbox,
    publisher: KvEventPublisher,
    sleeper: Sleeper,
    slot: Slot,
) -> NoReturn:
    """Compute steps until SIGTERM."""
    while True:
        slot.beat()
        engine.receive(inbox)
        engine.abort_expired()
        engine.poll_images()
        engine.poll_store()
        engine.run_once(workers)
        publisher.publish()
        sleeper.look()


def pages_to_give_back(config: EngineConfig, workers: WorkerGroup) -> tuple[int, ...]:
    """Return the descriptors of pages that the system takes back while workers live: of CPUs."""
    is_shared = workers.cache_id and not (workers.numerics or config.remote_stages)
    return config.cache_fds[1:] if is_shared else ()


def publish_events(config: EngineConfig, pool: PagePool) -> KvEventPublisher:
    """Have the pool note its events, if they are to be published, and return what does so."""
    if config.kv_events is None:
        return KvEventPublisher()
    pool.events = KvEventLog(pool.page_tokens)
    return KvEventPublisher(config.kv_events, pool.events)


def open_store(
    store: StoreClient,
    workers: WorkerGroup,
    engine: EngineCore,
    pools: CachePools,
    tier: HostTier | None,
) -> None:
    """Have the KV store open its files beneath the pool, or beneath a GPU's host tier.

    Where an engine before had some pages, it is not waited for.

    Raises:
        ConfigError: the workers' memory is their own.
    """
    layout, host = open_layout(workers), None if tier is None else tier.host
    step_s = engine.step_s if host is None else never  # a GPU's steps do not need the store's core
    fetcher = PageFetcher(*pools, layout, engine.prompt_s, time.monotonic, step_s, host)
    has_pages = (host or pools).pages.num_cached > 0
    store.open(OpenStore(layout, workers.numerics), fetcher, waits=not has_pages)


def never() -> float:
    """Return the time of steps where none runs."""
    return 0.0


def open_layout(workers: WorkerGroup) -> CacheLayout:
    """Return the records of workers whose pages a KV store can copy.

    Raises:
        ConfigError: their memory is their own.
    """
    if not workers.cache_id:
        raise ConfigError(
            "--kv-store and --kv-store-bytes need pages in shared memory, as Headrace's own code "
            "has them; leave them out"
        )
    return workers.cache_layout


def open_tables(
    config: EngineConfig, ready: WorkerReady, cache_id: bytes
) -> tuple[CacheTable, CacheTable]:
    """Return the tables of pages and state slots. Those of the engine before are kept.

    They are not, where they tell of other memory than the workers have. They are those of a GPU's
    host tier, if there is one.
    """
    counts = ready.num_pages, ready.num_states
    if ready.num_host_pages:
        counts = ready.num_host_pages, ready.num_host_states
    if not cache_id:
        pages, states = (CacheTable(count) for count in counts)
        return pages, states
    memory = map_tables(config.cache_fds[0], [table_bytes(count) for count in counts])
    pages, states = (CacheTable(*table) for table in zip(counts, memory, strict=True))
    for table in (pages, states):
        if table.cache_id != cache_id:
            table.begin(cache_id)
    return pages, states


def make_pool(
    ready: WorkerReady, config: EngineConfig, table: CacheTable | None = None
) -> PagePool:
    """Return the pool of the worker's pages.

    Raises:
        ConfigError: it cannot hold even one sequence of full length.
    """
    execution = config.execution
    num_tokens = ready.num_pages * ready.page_tokens
    if num_tokens < execution.max_model_len:
        num_bytes = execution.kv_cache_memory_bytes
        raise ConfigError(
            f"--kv-cache-memory-bytes {CPU_KV_BYTES if num_bytes is None else num_bytes} holds "
            f"{num_tokens} tokens, less than one sequence of --max-model-len "
            f"{execution.max_model_len}; raise it or lower that"
        )
    index = PrefixIndex(config.prefix_fds[0]) if config.prefix_fds else None
    return PagePool(ready.num_pages, ready.page_tokens, table, index)


def make_pools(
    ready: WorkerReady, config: EngineConfig, tables: tuple[CacheTable, CacheTable]
) -> CachePools:
    """Return the pools of the workers' pages and states. Tables may be those of a host tier."""
    pages, states = tables
    return CachePools(
        make_pool(ready, config, None if ready.num_host_pages else pages), make_slots(ready, states)
    )


def make_slots(ready: WorkerReady, table: CacheTable) -> StateSlots:
    """Return the slots of the worker's states. Copies to a host tier use some of them.

    Args:
        table: of the checkpoints, or of those of the host tier.
    """
    if ready.num_host_pages:
        return StateSlots(ready.num_states, num_reserved=COPY_SLOTS)
    return StateSlots(ready.num_states, table)


def make_copies(tier: HostTier, context: Context) -> PageCopies:
    """Return what has workers copy pages."""
    store_slot = context.board.slot("kv_store", context.index)
    return PageCopies(tier, context.slot, store_slot)


def make_host_tier(
    device: CachePools,
    ready: WorkerReady,
    workers: WorkerGroup,
    tables: tuple[CacheTable, CacheTable],
    store: StoreClient | None,
    tiers: StoreTiers | None,
) -> HostTier | None:
    """Return the tier beneath what GPUs have, and above a KV store on disk, if there is one.

    Args:
        tables: of the host's pages, and of its states.
    """
    if not ready.num_host_pages:
        return None
    layout = workers.cache_layout
    index_fd = None if tiers is None else tiers.index_fd
    index = None if index_fd is None else PrefixIndex(index_fd)
    pages = PagePool(layout.num_pages, device.pages.page_tokens, tables[0], index)
    host = CachePools(pages, StateSlots(layout.num_states, tables[1]))
    if store is None or not store.has_directory:
        return HostTier(device, host, layout)
    return HostTier(device, host, layout, store.enter)


def ahead_s(config: EngineConfig, ready: WorkerReady) -> float:
    """Return how long a step may take for another to be sent while it is computed."""
    if config.execution.pp > 1:  # no stage but the last knows what the step before draws
        return 0.0
    if config.async_scheduling is not None:
        return math.inf if config.async_scheduling else 0.0
    if ready.looks_ahead:
        return math.inf
    return SHORT_STEP_S if config.embedding_size is None else 0.0


def make_images(
    config: EngineConfig, arena: Arena | None, new_salt: Callable[[], bytes | None]
) -> EncoderQueue | None:
    """Return the encoder queue, if the model takes images."""
    if arena is None:
        return None
    assert config.image_token is not None
    pool = EncoderCache(num_area_rows(config))
    importance = Policy(config.scheduling_policy).importance
    return EncoderQueue(
        pool, config.image_token, arena.release, config.whole_images, importance, new_salt
    )


def make_scheduler(
    pool: PagePool,
    ready: WorkerReady,
    config: EngineConfig,
    images: EncoderQueue | None = None,
    slots: StateSlots | None = None,
    adapters: AdapterPool | None = None,
    store: StoreClient | None = None,
    tier: HostTier | None = None,
) -> Scheduler:
    """Return the scheduler for the flags."""
    execution = config.execution
    slots = slots or StateSlots(ready.num_states)
    num_seqs = slots.most_sequences
    if ready.num_states and num_seqs < execution.max_num_seqs:
        is_share = ready.looks_ahead and execution.kv_cache_memory_bytes is None  # of a GPU
        log.warning(
            "%d state slots are enough for %d running sequences, not for --max-num-seqs %d; lower "
            "that, or raise %s",
            ready.num_states,
            num_seqs,
            execution.max_num_seqs,
            "--gpu-memory-utilization or --tp" if is_share else "--kv-cache-memory-bytes",
        )
    longest = execution.max_model_len if ready.whole_prompts else 0
    lower = tier or store  # what is beneath the pool
    return Scheduler(
        pool,
        SchedulerLimits(
            max_num_seqs=execution.max_num_seqs,
            max_num_batched_tokens=max(execution.max_num_batched_tokens, longest),
            max_num_queued=config.max_num_queued,
            num_stages=config.num_micro_batches,
            whole_prompts=ready.whole_prompts or execution.is_prefix_lm,
        ),
        Policy(config.scheduling_policy),
        make_speculation(config, pool),
        config.enable_prefix_caching,
        images,
        slots,
        adapters,
        None if lower is None else lower.enter,
        None if tier is None else tier.copy_in,
    )


def make_adapters(config: EngineConfig) -> AdapterPool | None:
    """Return the pool of adapters, with `--enable-lora`."""
    execution = config.execution
    if not execution.enable_lora:
        return None
    return AdapterPool(execution.max_loras, execution.max_loaded_loras)


def make_adapter_loads(
    config: EngineConfig, pool: AdapterPool | None, scheduler: Scheduler, replica: int
) -> AdapterLoads | None:
    """Return what has workers load adapters, with `--enable-lora`."""
    if pool is None:
        return None
    return AdapterLoads(pool, AdapterRegistry(config.run_dir, None, replica), scheduler)


def make_speculation(config: EngineConfig, pool: PagePool) -> Speculation | None:
    """Return what chooses drafts, if the flags ask for some."""
    execution = config.execution
    if execution.speculative == "off" or config.embedding_size is not None:
        return None
    model = None
    if execution.speculative != "ngram":
        model = DraftModel(
            pool,
            execution.vocab_size,
            has_pages=execution.speculative != "self",
            from_hidden=execution.speculative in ("mtp", "eagle3"),
        )
    return Speculation(model, config.num_speculative_tokens)


def make_grammars(config: EngineConfig) -> MatcherQueue:
    """Return what compiles grammars. In an engine that listens it loads beside the workers."""
    grammars = MatcherQueue(lambda: load_compiler(config), config.eos_token_ids)
    if config.gateway is not None and config.embedding_size is None:
        grammars.begin()
    return grammars


def load_compiler(config: EngineConfig) -> "GrammarCompiler":
    """Load what compiles grammars."""
    from headrace.model.grammar_compiler import GrammarCompiler

    path = config.mistral_tokenizer or config.execution.model_path
    return GrammarCompiler(path, config.execution.vocab_size, config.eos_token_ids)
