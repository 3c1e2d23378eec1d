"""The config of each process: the few values that it needs of the flags and of the model."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from headrace.config.config import CPU_KV_BYTES, SECRETS, TYPES, ServerConfig
from headrace.config.kv_events_config import KvEventsConfig
from headrace.model.output_formats import ThoughtFormat, ToolFormat
from headrace.model.pooling import Pooling
from headrace.model.sampling_defaults import OPENAI, SamplingDefaults

IMAGE_DISK_PART = 8  # of --kv-store-disk-bytes one in so many is for embeddings of images


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Model facts for the processes around the engine. See `model_card.py`."""

    path: str
    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    chat_template: str | None
    special_tokens: dict[str, str]  # "bos_token" and "eos_token", as templates use them
    pooling: Pooling | None = None  # None generates
    embedding_size: int | None = None

    tool_format: ToolFormat | None = None
    thought_format: ThoughtFormat | None = None
    sampling_defaults: SamplingDefaults = OPENAI
    infill_token_ids: dict[str, int] = field(default_factory=dict)  # as GGUF names them
    image_token: int | None = None  # stands for each row of an image; None takes no images
    image_row_size: int = 0  # numbers of such a row
    image_run: int = 0  # adjacent tokens of an image that see each other; 0 see what is before them
    is_prefix_lm: bool = False  # all tokens of a prompt see each other, later ones included
    has_core_tower: bool = False  # on a CPU the C++ core runs its vision tower, without torch
    mmproj: str | None = None  # path of a projector file, beside that of a .gguf file
    draft_model: str | None = None  # of the draft model
    weight_bytes: int = 0  # of its files,
    draft_bytes: int = 0  # and of the draft model's
    tied_bytes: int = 0  # of an embedding that is the head, too
    image_text: str = ""  # for an image, where a chat template has no place for one; "" is none
    mistral_tokenizer: str | None = None  # path of a file that mistral-common reads: no template
    writes_harmony: bool = False  # of chats, as gpt-oss has them, in place of the template

    @property
    def takes_chats(self) -> bool:
        """Whether conversations become prompts."""
        others = self.mistral_tokenizer is not None or self.writes_harmony
        return self.chat_template is not None or others

    @property
    def tokenizer_path(self) -> str:
        """The path of the tokenizer's file, or of the model that has one."""
        return self.mistral_tokenizer or self.path

    @property
    def whole_images(self) -> bool:
        """Whether a step computes all adjacent tokens of an image, or none."""
        return self.image_run > 0

    @property
    def takes_images(self) -> bool:
        """Whether images may be parts of its messages."""
        return self.image_token is not None

    @property
    def embeds(self) -> bool:
        """Whether it makes vectors of texts, and generates none."""
        return self.pooling is not None and not self.pooling.scores

    @property
    def compares(self) -> bool:
        """Whether it is a cross-encoder, which scores pairs of texts."""
        return self.pooling is not None and self.pooling.scores


@dataclass(frozen=True, kw_only=True)
class CrashConfig:
    """For crash reports: their folder (None is no reports), and the server's flags."""

    directory: str | None
    flags: dict[str, Any]

    @classmethod
    def of(cls, config: ServerConfig, directory: str | None) -> "CrashConfig":
        """Return the flags of a server, without its keys."""
        public = {k: v for k, v in dataclasses.asdict(config).items() if k not in SECRETS}
        return cls(directory=directory, flags=public)


@dataclass(frozen=True, kw_only=True)
class ModelCapacity:
    """What a frontend knows of a model: its name, and what its engines hold."""

    name: str
    encoded_name: str  # as JSON
    max_num_requests: int  # open in each of its engines
    replica_bytes: int  # of a CPU's memory, that each of its engines may take
    why_fixed: str = ""  # it gets no more engines, and what to do; "" of one that does


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """For a frontend. `listen_fd` is its bound socket."""

    run_dir: str
    listen_fd: int
    num_tokenizers: int
    max_body_bytes: int
    models: tuple[ModelCapacity, ...]
    max_queued_tokens: int  # in all frontends; more get a 429, as with bodies
    drain_timeout: int  # seconds
    max_kept_bytes: int  # of bodies, held or on their way to a tokenizer process
    api_key_digests: list[bytes]
    admin_key_digests: list[bytes]  # none, or one
    allowed_origins: tuple[str, ...]
    ssl_certfile: str | None
    ssl_keyfile: str | None
    profiles: bool = False  # workers write some when operators ask
    ui: bool = True
    pages: dict[str, bytes] = field(default_factory=dict)  # JSON that never changes, by path
    anthropic_pages: dict[str, bytes] = field(default_factory=dict)  # to Anthropic's clients
    reports: bool = False  # to the telemetry process, of each request,
    traces: bool = False  # and with what its span has
    opens_adapters: bool = False  # to clients without the key of /admin


@dataclass(frozen=True, kw_only=True)
class RemoteEngine:
    """An engine on another machine."""

    address: str | None  # tcp://HOST:PORT; None is where its `PlacedAddress` says
    key_file: str
    terms: dict[str, str]  # what both machines have to have alike


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """For a tokenizer process."""

    run_dir: str
    cards: tuple[ModelCard, ...]  # of the server's models; a request without a name is the first's
    num_frontends: int
    num_detokenizers: int
    seed: int
    started_at: int  # seconds since the epoch; `created` of the model
    # That take short prompts; the next index has the long ones, those after it have images.
    num_tokenizers: int
    max_batch_size: int
    batch_wait_ms: int
    trust_request_chat_template: bool = False
    metrics_dialect: str = "vllm"
    follows_grammars: bool = True  # the engine does; a mock does not
    arena_fd: int | None = None  # None takes no images
    num_arena_regions: int = 0
    max_images: int = 0  # of a request
    fetched_fd: int | None = None  # the fetcher's arena; None fetches nothing
    handles_gets: bool = True  # the last index does, and encodes nothing
    takes_scripts: bool = False  # the engine is a mock
    traces: bool = False  # requests have spans
    # Of replicas, by engine: each `PrefixIndex`, that of its pool before that of its store.
    prefix_fds: dict[int, tuple[int, ...]] = field(default_factory=dict)
    enable_lora: bool = False
    lora_dir: str | None = None
    max_num_queued: tuple[int, ...] = ()  # sequences that wait for an engine, by model
    tells_loads: bool = False  # whether models are loaded: they come and go
    demand_fd: int = -1  # where to write when a request waits for a model; -1 is nowhere
    remote_engines: dict[int, RemoteEngine] = field(default_factory=dict)  # by seat


@dataclass(frozen=True, kw_only=True)
class FetcherConfig:
    """For the fetcher."""

    run_dir: str
    allowed_domains: tuple[str, ...]
    max_bytes: int  # of a request's images together
    fetched_fd: int  # an arena of one region, its own


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How a model is executed: one object for the engine, its workers and their loaders.

    A field that has the name of a flag has its value and its meaning.
    """

    model_path: str
    max_model_len: int
    vocab_size: int
    image_row_size: int  # numbers of a row of an image's embedding; 0 takes no images
    tp: int
    pp: int
    device: str
    model_impl: str
    load_format: str
    hf_overrides: str | None
    dtype: str
    quantization: str
    attention_backend: str
    kv_cache_dtype: str
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    enforce_eager: bool
    cudagraph_capture_sizes: tuple[int, ...]
    disable_custom_all_reduce: bool
    profile_dir: str | None
    nvtx: bool
    enable_lora: bool
    max_loras: int
    max_cpu_loras: int | None
    max_lora_rank: int
    lora_dtype: str
    distributed_executor_backend: str
    speculative: str
    kv_store: str | None
    kv_store_bytes: int
    mmproj: str | None = None
    draft_model: str | None = None  # of the draft model
    is_prefix_lm: bool = False  # as in `ModelCard`
    reserved_bytes: int = 0  # of memory, that other models of the server take at least

    @classmethod
    def of(
        cls, config: ServerConfig, card: ModelCard, reserved_bytes: int = 0
    ) -> "ExecutionConfig":
        """Combine the flags with the model's files."""
        flags = {
            f.name: getattr(config, f.name) for f in dataclasses.fields(cls) if f.name in TYPES
        }
        of_model = {
            "model_path": card.path,
            "mmproj": card.mmproj,
            "draft_model": card.draft_model,
            "max_model_len": card.max_model_len,
            "vocab_size": card.vocab_size,
            "image_row_size": card.image_row_size,
            "is_prefix_lm": card.is_prefix_lm,
            "reserved_bytes": reserved_bytes,
        }
        if card.is_prefix_lm:  # a step has the longest prompt whole, beside all decodes
            least = card.max_model_len + config.max_num_seqs
            of_model["max_num_batched_tokens"] = max(config.max_num_batched_tokens, least)
        return cls(**flags | of_model)

    @property
    def cpu_kv_bytes(self) -> int:
        """Memory of the KV cache on CPUs, of all workers together."""
        return CPU_KV_BYTES if self.kv_cache_memory_bytes is None else self.kv_cache_memory_bytes

    @property
    def num_workers(self) -> int:
        """The workers of the model: so many of each stage as share its layers."""
        return self.tp * self.pp

    @property
    def has_remote_stages(self) -> bool:
        """Whether each stage has a machine of its own."""
        return self.distributed_executor_backend == "ray"

    @property
    def num_local_workers(self) -> int:
        """The workers that share a machine."""
        return self.tp if self.has_remote_stages else self.num_workers

    @property
    def max_loaded_loras(self) -> int:
        """Adapters that workers hold at most."""
        return self.max_cpu_loras or self.max_loras


@dataclass(frozen=True, kw_only=True)
class RemoteStages:
    """The stages after the first, each on another machine, where its `PlacedAddress` says."""

    run_dir: str
    key_file: str
    watchdog_timeout: int  # seconds
    terms: dict[str, str]  # what all machines have to have alike


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """For a worker. The channels are inherited file descriptors."""

    execution: ExecutionConfig
    step_fd: int
    result_fd: int
    mask_fd: int
    rank: int = 0  # among the workers of its stage
    stage: int = 0
    before_fd: int | None = None  # of the link from the stage before,
    after_fd: int | None = None  # and of that to the next one
    group_fd: int | None = None  # where the ranks meet, if there are several,
    control_fd: int | None = None  # and the page of which GPUs know when to give up
    cache_fd: int | None = None  # of pages that outlive the worker; None keeps its own
    embedding_fd: int | None = None  # of images, if the model takes some
    tower_bytes: int = 0  # of this worker's GPU, that the vision worker has
    num_pages: int = 0  # as many as the workers before had, since the engine has; 0 is what fits
    num_states: int = 0  # likewise
    num_drafts: int = 0  # after each sequence's token, as a rule
    remote: RemoteStages | None = None  # of a stage on another machine; None computes here
    run: int = 0  # of all workers that have started together


@dataclass(frozen=True, kw_only=True)
class StoreTiers:
    """What is beneath the pool: memory, a directory on disk, or both."""

    memory_fds: tuple[int, ...] = ()  # of pages and of states
    index_fd: int | None = None  # of the `PrefixIndex` of pages in memory, where tokenizers read it
    memory_bytes: int = 0
    directory: str | None = None
    disk_bytes: int = 0
    takes_images: bool = False

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors."""
        return self.memory_fds if self.index_fd is None else (*self.memory_fds, self.index_fd)

    @property
    def disk_bytes_of_images(self) -> int:
        """The share of embeddings of images."""
        return self.disk_bytes // IMAGE_DISK_PART if self.takes_images else 0

    @property
    def disk_bytes_of_pages(self) -> int:
        """The share of pages and states."""
        return self.disk_bytes - self.disk_bytes_of_images


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """For a vision worker. Everything it works on is inherited by descriptor."""

    execution: ExecutionConfig  # of the decoder
    ask_fd: int
    answer_fd: int
    arena_fd: int
    num_arena_regions: int
    embedding_fd: int
    store_tiers: StoreTiers | None = None


@dataclass(frozen=True, kw_only=True)
class KvStoreConfig:
    """For the KV store. Everything it copies from and to in memory is inherited by descriptor."""

    execution: ExecutionConfig
    ask_fd: int
    answer_fd: int
    cache_fds: tuple[int, ...]  # as in `EngineConfig`
    tiers: StoreTiers


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """For the process that has engines placed on other machines, or stages of the server's own."""

    run_dir: str
    key_file: str
    seats: dict[str, tuple[str, int]]  # by the names of what is placed, such as "stage 1"
    num_cpus: int  # that each takes, like the next
    num_gpus: int
    flags: dict[str, Any]  # of the server on an engine's machine; those that a stage heeds
    address: str | None = None  # of the cluster; None is where Ray finds one
    are_stages: bool = False


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """For the process that has a stage's worker for a server on another machine."""

    listen: str  # tcp://HOST:PORT
    key_file: str


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """For an engine that serves another machine."""

    listen: str  # tcp://HOST:PORT
    key_file: str
    terms: dict[str, str]  # as in `RemoteEngine`
    prefix_fds: tuple[int, ...]  # as in `EngineConfig`


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """For the engine process."""

    run_dir: str
    execution: ExecutionConfig
    num_detokenizers: int
    max_num_queued: int
    scheduling_policy: str
    target_itl_ms: int
    enable_prefix_caching: bool
    async_scheduling: bool | None  # None is as the workers would have it
    num_speculative_tokens: int
    engine: str
    mock_profile: str
    embedding_size: int | None
    eos_token_ids: list[int]
    crash: CrashConfig
    arena_fd: int | None = None  # None takes no images
    num_arena_regions: int = 0
    image_token: int | None = None  # as in `ModelCard`, like the next
    whole_images: bool = False
    image_memory_bytes: int = 0  # of embeddings; more where a prompt of full length has more
    watchdog_timeout: int = 8  # seconds
    cache_fds: tuple[int, ...] = ()  # of the tables of pages, then of each worker's pages
    first_worker: int = 0  # index of the first of its workers
    num_replicas: int = 1  # engines of this model; each has a share of the cores,
    replica: int = 0  # this one's place among them
    # Of each `PrefixIndex`, its pool's before its store's; none of an engine without replicas.
    prefix_fds: tuple[int, ...] = ()
    store_tiers: StoreTiers | None = None  # None has no KV store
    kv_events: KvEventsConfig | None = None  # None publishes none
    mistral_tokenizer: str | None = None  # as in `ModelCard`
    remote: RemoteEngine | None = None  # None computes here
    gateway: GatewayConfig | None = None  # None serves its own ring
    remote_stages: RemoteStages | None = None  # None has all stages here

    @property
    def num_micro_batches(self) -> int:
        """The steps of different sequences that are in the stages of a pipeline at once."""
        return 1 if self.async_scheduling is False else self.execution.pp


@dataclass(frozen=True, kw_only=True)
class DetokenizerConfig:
    """For a detokenizer process."""

    run_dir: str
    tokenizer_paths: tuple[str, ...]  # of the server's models
    num_frontends: int
    stream_interval: int
    traces: bool = False  # requests have spans
    remote_engines: dict[int, RemoteEngine] = field(default_factory=dict)  # by seat
    vocab_size: int = 0  # of the model that remote engines have


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """For the telemetry process."""

    run_dir: str
    model: str  # the server's only one, by its name in the API; empty where there are several
    access_log: bool
    otlp_traces_endpoint: str | None
