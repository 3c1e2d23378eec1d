"""The flags of the server.

`ServerConfig` is the command line (`flags.py`): a field is a flag, its help is the documentation.
Processes never see it; each gets the few values it needs (`process_configs.py`).
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from headrace.board.board import MAX_FRONTENDS
from headrace.board.fields import MAX_PREPROCESSORS, MAX_REPLICAS, MAX_TOKENIZERS
from headrace.config.chaos import parse_chaos
from headrace.config.flag_values import at_least, at_most, flag_name, one_of
from headrace.config.kv_events_config import parse_kv_events
from headrace.config.lora_modules import lora_modules
from headrace.config.media_domains import read_domain
from headrace.config.otlp import check_otlp
from headrace.errors import ConfigError
from headrace.model.config_json import read_overrides
from headrace.model.output_formats import REASONING_PARSERS, TOOL_PARSERS

T = TypeVar("T")
DEVICES = ("auto", "cpu", "cuda")
MODEL_IMPLS = ("auto", "headrace", "transformers")
DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
KV_DTYPES = (*DTYPES, "fp8")
LORA_DTYPES = ("auto", "float32", "bfloat16")
ATTENTION_BACKENDS = ("auto", "triton", "flashinfer")
AUTO = "auto"
SPECULATIONS = ("off", "ngram", "draft_model", "self", "mtp", "eagle3")
BY_DRAFT_MODEL = ("draft_model", "eagle3")
MAX_DRAFTS = 15  # of a sequence in a step
BACKENDS = ("mp", "ray")
QUANTIZATIONS = ("none", "int8", "int8_weight_only", "fp8")
MAX_TP = 16  # of csrc/collectives/shm_group.h
MAX_PP = 8  # of step_channel.py: steps in flight
ENGINES = ("auto", "mock")
MIN_IMAGE_MEMORY_BYTES = 16 << 20
ON_GPUS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}  # defaults that differ from CPUs'
CPU_KV_BYTES = 2 << 30  # of the KV cache on CPUs, where no flag says otherwise
MAX_IMAGE_BYTES = 20 << 20  # of an image as it comes
MAX_AT_ONCE = 1 << 24  # sequences, and tokens of a step
MAX_BODY_BYTES = 1 << 40
MAX_NUMBER = (1 << 63) - 1  # of a flag
SECRETS = ("api_key", "admin_api_key")  # never shown
MIN_WATCHDOG_TIMEOUT = 2  # processes beat at least once a second
METRICS_DIALECTS = ("vllm", "sglang")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MAX_LORAS = 1 << 16
MAX_PORT = 65535
ADDRESS = re.compile(r"tcp://[\w.\-\[\]:%]+:\d{1,5}")
MAX_LORA_RANK = 1024


def flag(default: T, help: str, choices: Sequence[str] = ()) -> T:
    """Declare a field that is a flag."""
    metadata = {"help": help, "choices": choices or None}
    result: Any = field(default=default, metadata=metadata)
    return result  # type: ignore[no-any-return]  # dataclasses' own stubs lie in the same way


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The flags of `launch_server`."""

    model: str | None = flag(None, "a Hugging Face folder, a .gguf file or a hub id")
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "TCP port to listen on; 0 takes a free one")
    uds: str | None = flag(None, "a Unix socket to listen on instead")
    ssl_certfile: str | None = flag(None, "certificate, PEM; serve HTTPS")
    ssl_keyfile: str | None = flag(None, "its key, if not in the same file")
    api_key: tuple[str, ...] = flag((), "a key that clients must send; may be repeated")
    api_key_file: str | None = flag(None, "a file with a key on each line")
    admin_api_key: str | None = flag(None, "the key of /admin; without one /admin is closed")
    allowed_origins: tuple[str, ...] = flag(
        (), "an allowed origin (CORS); may be repeated; * is all"
    )
    ui: bool = flag(True, "serve a web page at /; --no-ui does not")
    served_model_name: str | None = flag(None, "the model's name in the API; default: its own")
    tp: int = flag(1, "tensor parallel size: workers that share the model")
    pp: int = flag(
        1, "pipeline parallel size: stages that divide the layers, each with --tp workers; on CPUs"
    )
    distributed_executor_backend: str = flag(
        "mp",
        "ray: stages of --pp on nodes of a Ray cluster",
        BACKENDS,
    )
    data_parallel_size: int = flag(
        1,
        "replicas of the model: each an engine with --tp workers and a share of the cores; auto is "
        "one per NUMA node; 0 has none here",
    )
    data_parallel_backend: str = flag(
        "mp", "mp: replicas on this machine; ray: on the nodes of a Ray cluster", BACKENDS
    )
    data_parallel_size_local: int | None = flag(
        None, "replicas of --data-parallel-size on this machine, with ray; default: 0"
    )
    address: str | None = flag(None, "HOST:PORT of Ray's head; default: RAY_ADDRESS, or here")
    remote_engines: tuple[str, ...] = flag(
        (), "a replica on another machine, tcp://HOST:PORT; may be repeated"
    )
    engine_listen: str | None = flag(None, "serve an engine to another machine, at tcp://HOST:PORT")
    engine_key_file: str | None = flag(
        None, "key of links between machines; --engine-listen makes it"
    )
    max_loaded_models: int | None = flag(
        None,
        "models loaded at once; others load on demand; 0 is what memory holds; default: all",
    )
    disable_custom_all_reduce: bool = flag(False, "NCCL computes sums over GPUs of any size")
    enforce_eager: bool = flag(False, "no CUDA graphs: faster start, slower steps")
    cudagraph_capture_sizes: tuple[int, ...] = flag(
        (), "token counts of CUDA graphs, as 1 2 4 8; default: many"
    )
    frontend_procs: int = flag(1, "HTTP processes, sharing the port")
    tokenizer_procs: int = flag(1, "tokenizer processes, beside the one for long prompts")
    preprocess_procs: int = flag(1, "processes that prepare images, for models that take images")
    detokenizer_procs: int = flag(1, "detokenizer processes")
    tokenizer_max_batch_size: int = flag(32, "requests encoded together; 1 is no batching")
    tokenizer_batch_wait_ms: int = flag(2, "longest time to fill a batch")
    mmproj: str | None = flag(
        None, "a GGUF projector file, mmproj-*.gguf: a .gguf MODEL takes images"
    )
    max_model_len: int | None = flag(None, "context length in tokens; default: the model's")
    engine: str = flag("auto", "mock: no model, step times from a profile", ENGINES)
    mock_profile: str = flag("zero", "zero, 2ms, h200-8b, encoder (estimates), or a JSON file")
    device: str = flag("auto", "auto is GPUs that can run the model", DEVICES)
    model_impl: str = flag("auto", "model implementation; auto prefers Headrace's own", MODEL_IMPLS)
    load_format: str = flag(
        "auto",
        "dummy: random weights, for a folder with config.json and a tokenizer alone",
        LOAD_FORMATS,
    )
    hf_overrides: str | None = flag(None, "JSON object: fields that replace those of config.json")
    dtype: str = flag(
        "auto",
        "type of products; auto is as stored, of encoders what is fast, on GPUs "
        "float16 or bfloat16; float16 is for GPUs",
        DTYPES,
    )
    quantization: str = flag(
        "none",
        "int8 rounds weights and activations to 8 bits in groups of 32, int8_weight_only weights "
        "alone; fp8, on GPUs: weights by row, activations by token",
        QUANTIZATIONS,
    )
    attention_backend: str = flag(
        "auto",
        "attention backend on GPUs; auto is triton; with flashinfer, for long prompts, a text may "
        "depend on its batch mates",
        ATTENTION_BACKENDS,
    )
    seed: int = flag(0, "seed of requests without one")
    max_num_seqs: int = flag(64, "sequences that run at once; on GPUs the default is 256")
    max_num_batched_tokens: int = flag(
        512, "tokens computed in one step; on GPUs the default is 8192"
    )
    max_num_queued: int = flag(1024, "waiting sequences; further ones get 429")
    max_queued_tokens: int = flag(0, "waiting prompt tokens; further ones get 429; 0 is no limit")
    scheduling_policy: str = flag(
        "fcfs",
        "order of the queue; lpm is longest cached prefix; then fair shares by key",
        ("fcfs", "priority", "lpm"),
    )
    target_itl_ms: int = flag(
        100, "target time between tokens of running streams: prompts are cut to keep it; 0 is off"
    )
    enable_prefix_caching: bool = flag(True, "compute a shared prefix once")
    async_scheduling: bool | None = flag(
        None,
        "send a step while the previous one is computed; default: on GPUs, while steps are "
        "short, and full ones of texts to embed",
    )
    speculative: str = flag(
        "off",
        "draft tokens, which change no output: from the text (ngram), and from a second model "
        "(draft_model), the weights in 4 bits (self), a layer of the model (mtp) or EAGLE-3's",
        SPECULATIONS,
    )
    draft_model: str | None = flag(
        None, "a small model with the same vocabulary, or a folder of EAGLE-3: drafts tokens"
    )
    num_speculative_tokens: int = flag(
        MAX_DRAFTS, "most drafts of a sequence in a step; fewer where more do not pay"
    )
    gpu_memory_utilization: float = flag(
        0.9, "share of each GPU for weights, steps, the KV cache and a vision tower"
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        f"memory of the KV cache, of all workers together; default: on CPUs {CPU_KV_BYTES}, on "
        f"GPUs what --gpu-memory-utilization leaves",
    )
    kv_cache_dtype: str = flag(
        "auto",
        "keys and values; auto is bfloat16, on GPUs the type of products; float16, fp8 are for "
        "GPUs",
        KV_DTYPES,
    )
    kv_store: str | None = flag(
        None,
        "a folder that keeps evicted pages; a restarted server finds them, others may share it",
    )
    kv_store_disk_bytes: int = flag(16 << 30, "disk space of this server in --kv-store")
    kv_store_bytes: int = flag(0, "memory beside the KV cache for its pages; 0 is none")
    kv_events_config: str | None = flag(
        None, "publish which pages are cached, in vLLM's format: JSON with endpoint and topic"
    )
    stream_interval: int = flag(1, "tokens per event of a stream, except the first and last")
    max_body_bytes: int = flag(32 << 20, "larger request bodies get 413")
    max_images: int = flag(16, "images per request; 0 is text alone")
    image_memory_bytes: int = flag(
        512 << 20,
        "prepared images per image process, cached ones included; embeddings may take as much "
        "again",
    )
    allowed_media_domains: tuple[str, ...] = flag(
        (), "a host that images may be fetched from, or HOST:PORT at any address; may be repeated"
    )
    tokenizer_mode: str = flag(
        "auto",
        "mistral reads a tekken.json",
        ("auto", "hf", "mistral"),
    )
    chat_template: str | None = flag(
        None, "a Jinja file to use instead of the model's chat template"
    )
    tool_call_parser: str = flag(
        "auto", "format of the model's tool calls; auto reads the chat template", TOOL_PARSERS
    )
    reasoning_parser: str = flag(
        "auto", "format of the model's reasoning; auto reads the chat template", REASONING_PARSERS
    )
    generation_config: str = flag(
        "auto",
        "defaults of sampling and length: auto takes the model's generation_config.json, vllm "
        "takes OpenAI's",
        ("auto", "vllm"),
    )
    trust_request_chat_template: bool = flag(False, "requests may bring a chat_template")
    metrics_dialect: str = flag("vllm", "metric names beside headrace:", METRICS_DIALECTS)
    drain_timeout: int = flag(
        30,
        "seconds for open requests to end after SIGTERM; a second SIGTERM, and Ctrl-C, end at once",
    )
    watchdog_timeout: int = flag(8, "seconds without a heartbeat after which a process is replaced")
    chaos: str | None = flag(
        None, "fault injection, ends processes at random: kill=engine:0.1/s,stop=worker:0.02/s"
    )
    record: str | None = flag(
        None, "a folder that records all messages, texts of requests included"
    )
    crash_dir: str | None = flag(None, "folder for crash reports; an empty one keeps none")
    profile_dir: str | None = flag(None, "folder for profiles of steps, see POST /start_profile")
    nvtx: bool = flag(False, "mark the phases of steps on GPUs for Nsight Systems")
    enable_lora: bool = flag(False, "serve adapters (LoRA) beside the model")
    lora_modules: tuple[str, ...] = flag(
        (), "an adapter from the start, NAME=PATH or JSON with name and path; may be repeated"
    )
    lora_dir: str | None = flag(None, "a folder of adapters, which requests name")
    allow_runtime_lora_updating: bool = flag(
        False, "clients without the key of /admin load and unload adapters, too"
    )
    max_loras: int = flag(8, "adapters with sequences that run at once")
    max_cpu_loras: int | None = flag(None, "adapters in memory; default: --max-loras")
    max_lora_rank: int = flag(64, "adapters of a higher rank are refused")
    lora_dtype: str = flag(
        "auto",
        "type of adapters in memory; auto is bfloat16, with --dtype float32 that",
        LORA_DTYPES,
    )
    log_level: str = flag("info", "log level", LOG_LEVELS)
    access_log: bool = flag(False, "a log line per request")
    otlp_traces_endpoint: str | None = flag(
        None, "URL of an OpenTelemetry collector: a trace per request; takes headrace[otel]"
    )
    log_format: str = flag("text", "form of log lines; json is an object per line", LOG_FORMATS)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            one_of(f.name, getattr(self, f.name), f.metadata["choices"])
            check_plain(f.name, getattr(self, f.name))
        for name in ("frontend_procs", "tokenizer_procs", "detokenizer_procs", "max_num_seqs"):
            at_least(name, getattr(self, name), 1)
        at_least("preprocess_procs", self.preprocess_procs, 1)
        at_most("preprocess_procs", self.preprocess_procs, MAX_PREPROCESSORS)
        at_least("max_images", self.max_images, 0)
        at_least("image_memory_bytes", self.image_memory_bytes, MIN_IMAGE_MEMORY_BYTES)
        for domain in self.allowed_media_domains:
            read_domain(domain)
        at_least("tp", self.tp, 1)
        at_most("tp", self.tp, MAX_TP)
        self._check_stages()
        at_least("data_parallel_size", self.data_parallel_size, 0 if self.remote_engines else 1)
        at_most("data_parallel_size", self.data_parallel_size, MAX_REPLICAS)
        self._check_placement()
        self._check_remote()
        if self.max_loaded_models is not None:
            at_least("max_loaded_models", self.max_loaded_models, 0)
        at_least("tokenizer_max_batch_size", self.tokenizer_max_batch_size, 1)
        at_least("tokenizer_batch_wait_ms", self.tokenizer_batch_wait_ms, 0)
        at_least("max_num_queued", self.max_num_queued, 1)
        at_least("max_queued_tokens", self.max_queued_tokens, 0)
        at_least("target_itl_ms", self.target_itl_ms, 0)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization:g} is not a share; it must "
                "be above 0 and at most 1"
            )
        for size in self.cudagraph_capture_sizes:
            at_least("cudagraph_capture_sizes", size, 1)
        parse_chaos(self.chaos)
        self._check_overrides()
        self._check_kv_store()
        self._check_adapters()
        self._check_speculation()
        at_least("drain_timeout", self.drain_timeout, 0)
        at_least("watchdog_timeout", self.watchdog_timeout, MIN_WATCHDOG_TIMEOUT)
        at_least("stream_interval", self.stream_interval, 1)
        at_least("max_body_bytes", self.max_body_bytes, 1)
        at_most("max_body_bytes", self.max_body_bytes, MAX_BODY_BYTES)
        at_most("max_num_seqs", self.max_num_seqs, MAX_AT_ONCE)
        at_most("max_num_batched_tokens", self.max_num_batched_tokens, MAX_AT_ONCE)
        at_most("frontend_procs", self.frontend_procs, MAX_FRONTENDS)
        at_most("tokenizer_procs", self.tokenizer_procs, MAX_TOKENIZERS)
        at_most("detokenizer_procs", self.detokenizer_procs, 256)
        at_least("port", self.port, 0)
        at_most("port", self.port, MAX_PORT)
        at_least("seed", self.seed, 0)
        if self.max_model_len is not None:
            at_least("max_model_len", self.max_model_len, 2)
        if self.quantization != "none" and self.dtype != "auto":
            raise ConfigError(
                f"--quantization {self.quantization} says how weights are held; "
                f"leave out --dtype {self.dtype}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs "
                f"{self.max_num_seqs}: every running sequence needs one token per step"
            )

    @property
    def num_own_engines(self) -> int:
        """The engines on this machine."""
        is_own = self.data_parallel_backend == "mp"
        return self.data_parallel_size if is_own else self.data_parallel_size_local or 0

    @property
    def num_placed_engines(self) -> int:
        """Those that Ray places."""
        return self.data_parallel_size - self.num_own_engines

    @property
    def num_remote_engines(self) -> int:
        """All that are on other machines."""
        return len(self.remote_engines) + self.num_placed_engines

    @property
    def has_remote_stages(self) -> bool:
        """Whether each stage has a machine of its own."""
        return self.distributed_executor_backend == "ray"

    @property
    def num_workers(self) -> int:
        """The workers of an engine."""
        return self.tp * self.pp

    def may_use_gpus(self, has_gpus: bool) -> bool:
        """Whether the flags put the model on GPUs."""
        return may_use_gpus(self.device, self.pp, has_gpus)

    def _check_stages(self) -> None:
        at_least("pp", self.pp, 1)
        at_most("pp", self.pp, MAX_PP)
        lacks = {
            "--speculative": self.speculative != "off",
            "--enable-lora": self.enable_lora,
            "--device cuda": self.device == "cuda",
            "--model-impl transformers": self.model_impl == "transformers",
        }
        refused = [flag for flag, is_given in lacks.items() if is_given]
        if self.pp > 1 and refused:
            raise ConfigError(f"--pp {self.pp} does not go with {refused[0]}; leave out one")
        if self.has_remote_stages:
            self._check_remote_stages()

    def _check_remote_stages(self) -> None:
        if self.pp == 1:
            raise ConfigError(
                "--distributed-executor-backend ray places the stages of a pipeline; give --pp 2 "
                "or more, or leave it out"
            )
        lacks = {
            "--tp": self.tp > 1,
            "--data-parallel-size": self.data_parallel_size != 1,
            "--data-parallel-backend ray": self.data_parallel_backend == "ray",
            "--remote-engines": bool(self.remote_engines),
            "--engine-listen": self.engine_listen is not None,
            "--kv-store": self.kv_store is not None,
            "--kv-store-bytes": self.kv_store_bytes > 0,
            "--engine mock": self.engine == "mock",
        }
        refused = [flag for flag, is_given in lacks.items() if is_given]
        if refused:
            raise ConfigError(
                f"--distributed-executor-backend ray does not go with {refused[0]}; leave out one"
            )

    def _check_placement(self) -> None:
        if self.address is not None and not (
            self.has_remote_stages or self.data_parallel_backend == "ray"
        ):
            raise ConfigError(
                f"--address {self.address} is of a Ray cluster; give --data-parallel-backend ray "
                "or --distributed-executor-backend ray, or leave it out"
            )
        local = self.data_parallel_size_local
        if local is None:
            return
        at_least("data_parallel_size_local", local, 0)
        at_most("data_parallel_size_local", local, self.data_parallel_size)
        if self.data_parallel_backend == "mp" and local != self.data_parallel_size:
            raise ConfigError(
                f"--data-parallel-size-local {local} leaves replicas for other machines; give "
                "--data-parallel-backend ray, or name the machines by --remote-engines"
            )

    def _check_remote(self) -> None:
        listen, engines = self.engine_listen, self.remote_engines
        for where in (*engines, *([] if listen is None else [listen])):
            check_address("engine_listen" if where == listen else "remote_engines", where)
        is_used = listen is not None or bool(engines)
        if is_used != (self.engine_key_file is not None):
            raise ConfigError(
                "--engine-key-file goes together with --engine-listen or --remote-engines"
            )
        if (is_used or self.num_placed_engines) and self.enable_lora:
            raise ConfigError("--enable-lora: engines of several machines have no adapters")
        is_alone = self.data_parallel_size == self.num_own_engines == 1 and not engines
        if listen is not None and not is_alone:
            raise ConfigError(
                f"--engine-listen {listen} serves one engine of this machine; leave out "
                "--data-parallel-size, --data-parallel-backend and --remote-engines"
            )

    def _check_overrides(self) -> None:
        read_overrides(self.hf_overrides)
        if self.hf_overrides is not None and self.model_impl == "transformers":
            raise ConfigError("--hf-overrides does not go with --model-impl transformers")

    def _check_kv_store(self) -> None:
        num_engines = self.num_own_engines + self.num_remote_engines
        if parse_kv_events(self.kv_events_config) is not None and num_engines > 1:
            raise ConfigError(
                "--kv-events-config has one endpoint, and --data-parallel-size "
                f"{self.data_parallel_size} and --remote-engines have several engines; run a "
                "server for each"
            )
        at_least("kv_store_bytes", self.kv_store_bytes, 0)
        at_least("kv_store_disk_bytes", self.kv_store_disk_bytes, 1)
        if self.has_kv_store and not self.enable_prefix_caching:
            raise ConfigError(
                "--kv-store and --kv-store-bytes keep cached prefixes; leave out "
                "--no-enable-prefix-caching"
            )

    @property
    def has_kv_store(self) -> bool:
        """Whether evicted pages are kept."""
        return self.kv_store is not None or self.kv_store_bytes > 0

    def _check_adapters(self) -> None:
        at_least("max_loras", self.max_loras, 1)
        at_most("max_loras", self.max_loras, MAX_LORAS)
        at_least("max_lora_rank", self.max_lora_rank, 1)
        at_most("max_lora_rank", self.max_lora_rank, MAX_LORA_RANK)
        if self.max_cpu_loras is not None:
            at_least("max_cpu_loras", self.max_cpu_loras, self.max_loras)
            at_most("max_cpu_loras", self.max_cpu_loras, MAX_LORAS)
        lora_modules(self.lora_modules)
        if (self.lora_modules or self.lora_dir is not None) and not self.enable_lora:
            name = "lora_modules" if self.lora_modules else "lora_dir"
            raise ConfigError(f"{flag_name(name)} needs --enable-lora")
        if self.enable_lora and self.engine == "mock":
            raise ConfigError("--enable-lora: a mock engine has no adapters")

    def _check_speculation(self) -> None:
        at_least("num_speculative_tokens", self.num_speculative_tokens, 1)
        at_most("num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFTS)
        if (self.speculative in BY_DRAFT_MODEL) != (self.draft_model is not None):
            raise ConfigError(
                f"--speculative {self.speculative} and --draft-model {self.draft_model}: a draft "
                f"model and --speculative {' or '.join(BY_DRAFT_MODEL)} go together"
            )


TYPES: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(ServerConfig)}


def may_use_gpus(device: str, num_stages: int, has_gpus: bool) -> bool:
    """Whether a model goes to GPUs; several stages never do.

    Args:
        has_gpus: whether `--device auto` finds some.
    """
    return device == "cuda" or (device == "auto" and has_gpus and num_stages == 1)


def config_of(flags: Mapping[str, Any], has_gpus: bool, num_nodes: int = 1) -> ServerConfig:
    """Return the configuration with these flags, the others as suits where the model will run.

    Args:
        has_gpus: whether `--device auto` finds some.
        num_nodes: of NUMA, for `--data-parallel-size auto`.

    Raises:
        ConfigError: a flag has a value that cannot work; the text names it.
    """
    if flags.get("data_parallel_size") == AUTO:
        if flags.get("data_parallel_backend") == "ray":
            raise ConfigError(
                "--data-parallel-size auto is for replicas on this machine; give their number"
            )
        flags = {**flags, "data_parallel_size": num_nodes}
    values = {name: typed(name, value) for name, value in flags.items()}
    if values.get("draft_model") is not None:
        values.setdefault("speculative", "draft_model")
    on_gpus = may_use_gpus(values.get("device", "auto"), values.get("pp", 1), has_gpus)
    config = ServerConfig(**({**ON_GPUS, **values} if on_gpus else values))
    if config.otlp_traces_endpoint is not None:
        check_otlp(config.otlp_traces_endpoint, os.environ)
    return config


def typed(name: str, value: Any) -> Any:
    """Return a flag's value in the flag's type. A program may give anything; a dict is JSON."""
    try:
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        plain = msgspec.json.encode(value).decode() if isinstance(value, dict) else plain
        return msgspec.convert(plain, TYPES[name])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{flag_name(name)}: {error}") from None


def check_address(name: str, where: str) -> None:
    """Refuse what is no address of a link between machines. It outlives processes: no port is 0."""
    if ADDRESS.fullmatch(where) is None or not 0 < int(where.rpartition(":")[2]) <= MAX_PORT:
        raise ConfigError(f"{flag_name(name)} {where} is no address; it must be tcp://HOST:PORT")


def check_plain(name: str, value: object) -> None:
    """Refuse values that cannot be sent to other processes: long numbers, and text that is not
    UTF-8."""
    if isinstance(value, tuple):
        for item in value:
            check_plain(name, item)
    elif isinstance(value, int):
        at_most(name, value, MAX_NUMBER)
    elif isinstance(value, str) and not is_utf8(value):
        shown = "" if name in SECRETS else f" {value!a}"
        raise ConfigError(f"{flag_name(name)}{shown} is not UTF-8")


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded; one from a command line may have bytes that are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
