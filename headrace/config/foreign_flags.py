"""Flags of vLLM and SGLang, and their meaning here.

A flag that means what one of ours does is taken for it. One that asks for what is so anyhow is
taken and changes nothing. One that tunes what Headrace does otherwise is taken, and the log
says so. Any other is refused by a line that says what to do instead.
`python -m headrace.config.foreign_flags` prints `docs/migration.md`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from headrace.config.config import BY_DRAFT_MODEL, SPECULATIONS
from headrace.config.flag_values import flag_name
from headrace.errors import ConfigError


@dataclass(frozen=True)
class Same:
    """An alias of one of our flags. `read` converts its value."""

    field: str
    read: Callable[[str], str] = str


@dataclass(frozen=True)
class Switch:
    """One of our flags turned on or off; the alias takes no value."""

    field: str
    on: bool


@dataclass(frozen=True)
class Already:
    """A flag for existing behavior. Without `values` it takes none; other values are refused."""

    values: tuple[str, ...] = ()
    instead: str = ""


@dataclass(frozen=True)
class Unused:
    """A flag whose value changes nothing; `why` is for the log, and names the alternative."""

    why: str


@dataclass(frozen=True)
class RefusedFlag:
    """A rejected flag; `instead` is the remedy."""

    instead: str


@dataclass(frozen=True)
class SeveralFlags:
    """Values of some of our flags. `read` returns them by field."""

    fields: tuple[str, ...]
    read: Callable[[str], dict[str, str]]


Meaning = Same | SeveralFlags | Switch | Already | Unused | RefusedFlag


@dataclass(frozen=True)
class Row:
    """A flag's subject, its spellings in vLLM and SGLang, and its meaning here."""

    purpose: str
    vllm: tuple[str, ...]
    sglang: tuple[str, ...]
    meaning: Meaning


def spelled(values: Mapping[str, str]) -> Callable[[str], str]:
    """Return what makes some values ours and leaves the others."""
    return lambda value: values.get(value, value)


def speculation(config: str) -> dict[str, str]:
    """Read vLLM's --speculative-config, a JSON object. A model without a method is a draft model.

    Its further keys say how drafts are looked for or computed, and change no output.
    """
    try:
        values = msgspec.json.decode(config, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--speculative-config is not a JSON object: {error}") from None
    method = values.get("method", "draft_model" if "model" in values else None)
    method = "mtp" if str(method).endswith("_mtp") else method  # vLLM's older names, by family
    if method not in SPECULATIONS[1:]:
        raise ConfigError(
            f"--speculative-config with method {method} is not supported; "
            f"use {' or '.join(SPECULATIONS[1:])}"
        )
    if method == "self" and values.get("quantization", "q4") != "q4":
        raise ConfigError(
            f"--speculative-config with quantization {values['quantization']} is not supported; "
            "use q4"
        )
    flags = {"speculative": method, "num_speculative_tokens": values.get("num_speculative_tokens")}
    if method in BY_DRAFT_MODEL:
        flags["draft_model"] = values.get("model")
    return {field: str(value) for field, value in flags.items() if value is not None}


def chunk(value: str) -> str:
    """Read SGLang's --chunked-prefill-size."""
    if value.startswith("-"):
        raise ConfigError(f"--chunked-prefill-size {value} is not supported; {WHOLE_PROMPTS}")
    return value


def max_images(limits: str) -> str:
    """Read vLLM's --limit-mm-per-prompt, a JSON object."""
    try:
        return str(msgspec.json.decode(limits, type=dict[str, int])["image"])
    except (msgspec.DecodeError, KeyError):
        raise ConfigError(f"{limits} says nothing of images; use --max-images") from None


def from_gib(number: str) -> str:
    """Read a size in GiB."""
    try:
        return str(round(float(number) * 2**30))
    except ValueError:
        raise ConfigError(f"{number} is not a number of GiB") from None


def milliseconds(seconds: str) -> str:
    """Read SGLang's --dynamic-batch-tokenizer-batch-timeout, in seconds; parts count as a whole."""
    try:
        return str(math.ceil(float(seconds) * 1e3 - 1e-9))
    except (ValueError, OverflowError):
        raise ConfigError(f"{seconds} is not a number; use --tokenizer-batch-wait-ms") from None


WHOLE_PROMPTS = "raise --max-num-batched-tokens and use --target-itl-ms 0"
KV_DTYPES = spelled({"bf16": "bfloat16", "fp8_e4m3": "fp8"})
DTYPES = spelled({"float": "float32", "half": "float16", "bf16": "bfloat16"})
ATTENTION_BACKENDS = spelled({"TRITON_ATTN": "triton", "FLASHINFER": "flashinfer"})
LOAD_FORMATS = spelled({"safetensors": "auto", "gguf": "auto"})
CHECKPOINTS = ("gguf", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors")
QUANTIZATIONS = spelled({"w8a8_int8": "int8"} | dict.fromkeys(CHECKPOINTS, "none"))
ONE_MACHINE = "run one server per machine, behind a load balancer"
NO_FILES = "send images in data: URLs, or serve them and use --allowed-media-domains"
HOST_TIER = "use --kv-store-bytes, the bytes of all workers together"
ON_REQUESTS = "send chat_template_kwargs with each request"

ROWS = [
    Row("model", ("--model",), ("--model-path", "--model"), Same("model")),
    Row(
        "tokenizer",
        ("--tokenizer",),
        ("--tokenizer-path",),
        RefusedFlag("the model's own is used; put another tokenizer.json into its folder"),
    ),
    Row("tokenizer", ("--tokenizer-mode",), ("--tokenizer-mode",), Same("tokenizer_mode")),
    Row("host", ("--host",), ("--host",), Same("host")),
    Row("port", ("--port",), ("--port",), Same("port")),
    Row("Unix socket", ("--uds",), (), Same("uds")),
    Row("name", ("--served-model-name",), ("--served-model-name",), Same("served_model_name")),
    Row("device", ("--device",), ("--device",), Same("device")),
    Row("dtype", ("--dtype",), ("--dtype",), Same("dtype", DTYPES)),
    Row(
        "quantization",
        ("--quantization", "-q"),
        ("--quantization",),
        Same("quantization", QUANTIZATIONS),
    ),
    Row(
        "KV dtype", ("--kv-cache-dtype",), ("--kv-cache-dtype",), Same("kv_cache_dtype", KV_DTYPES)
    ),
    Row("context", ("--max-model-len",), ("--context-length",), Same("max_model_len")),
    Row("memory", ("--gpu-memory-utilization",), (), Same("gpu_memory_utilization")),
    Row(
        "memory",
        (),
        ("--mem-fraction-static",),
        RefusedFlag("use --gpu-memory-utilization, in whose share steps are counted, too"),
    ),
    Row("KV size", ("--kv-cache-memory-bytes",), (), Same("kv_cache_memory_bytes")),
    Row(
        "KV size",
        ("--num-gpu-blocks-override",),
        ("--max-total-tokens",),
        RefusedFlag("use --kv-cache-memory-bytes"),
    ),
    Row("running", ("--max-num-seqs",), ("--max-running-requests",), Same("max_num_seqs")),
    Row("queue", ("--max-num-queued-reqs",), ("--max-queued-requests",), Same("max_num_queued")),
    Row("queue", ("--max-num-queued-tokens",), (), Same("max_queued_tokens")),
    Row("tokens of a step", ("--max-num-batched-tokens",), (), Same("max_num_batched_tokens")),
    Row("tokens of a step", (), ("--chunked-prefill-size",), Same("max_num_batched_tokens", chunk)),
    Row(
        "tokens of a step",
        (),
        ("--max-prefill-tokens",),
        RefusedFlag("use --max-num-batched-tokens"),
    ),
    Row(
        "page",
        ("--block-size",),
        ("--page-size",),
        RefusedFlag("leave it out: pages are as long as the worker is fastest with"),
    ),
    Row(
        "tensor parallel",
        ("--tensor-parallel-size", "-tp"),
        ("--tp-size", "--tensor-parallel-size", "--tp"),
        Same("tp"),
    ),
    Row(
        "pipeline parallel",
        ("--pipeline-parallel-size", "-pp"),
        ("--pp-size", "--pipeline-parallel-size"),
        Same("pp"),
    ),
    Row(
        "stages by Ray",
        ("--distributed-executor-backend",),
        (),
        Same("distributed_executor_backend", spelled({"uni": "mp"})),
    ),
    Row(
        "data parallel",
        ("--data-parallel-size", "-dp"),
        ("--dp-size", "--data-parallel-size", "--dp"),
        Same("data_parallel_size"),
    ),
    Row(
        "replicas by Ray",
        ("--data-parallel-backend", "-dpb"),
        (),
        Same("data_parallel_backend"),
    ),
    Row(
        "replicas on this machine",
        ("--data-parallel-size-local", "-dpl"),
        (),
        Same("data_parallel_size_local"),
    ),
    Row(
        "expert parallel",
        ("--enable-expert-parallel",),
        (),
        RefusedFlag("experts are computed where the rest of the model is"),
    ),
    Row(
        "expert parallel",
        (),
        ("--ep-size", "--expert-parallel-size", "--ep"),
        Already(("1",), "experts are computed where the rest of the model is"),
    ),
    Row("several nodes", ("--nnodes",), ("--nnodes",), Already(("1",), ONE_MACHINE)),
    Row("several nodes", ("--node-rank",), ("--node-rank",), Already(("0",), ONE_MACHINE)),
    Row(
        "several nodes",
        ("--master-addr", "--headless"),
        ("--dist-init-addr",),
        RefusedFlag("see --remote-engines and --engine-listen, for replicas on other machines"),
    ),
    Row(
        "code of models",
        ("--trust-remote-code",),
        ("--trust-remote-code",),
        RefusedFlag("no code that comes with weights is run"),
    ),
    Row("load format", ("--load-format",), ("--load-format",), Same("load_format", LOAD_FORMATS)),
    Row("config.json", ("--hf-overrides",), ("--json-model-override-args",), Same("hf_overrides")),
    Row(
        "kind",
        ("--runner", "--convert", "--task"),
        (),
        Unused("the model's files say whether it embeds, compares or generates; --hf-overrides"),
    ),
    Row(
        "download folder",
        ("--download-dir",),
        ("--download-dir",),
        RefusedFlag("set HF_HOME, which every tool of the hub reads"),
    ),
    Row("prefix cache", ("--enable-prefix-caching",), (), Switch("enable_prefix_caching", True)),
    Row(
        "prefix cache",
        ("--no-enable-prefix-caching",),
        ("--disable-radix-cache",),
        Switch("enable_prefix_caching", False),
    ),
    Row("chunked prefill", ("--enable-chunked-prefill",), (), Already()),
    Row("chunked prefill", ("--no-enable-chunked-prefill",), (), RefusedFlag(WHOLE_PROMPTS)),
    Row("overlap", ("--async-scheduling",), (), Switch("async_scheduling", True)),
    Row(
        "overlap",
        ("--no-async-scheduling",),
        ("--disable-overlap-schedule",),
        Switch("async_scheduling", False),
    ),
    Row(
        "all-reduce",
        ("--disable-custom-all-reduce",),
        ("--disable-custom-all-reduce",),
        Switch("disable_custom_all_reduce", True),
    ),
    Row(
        "CUDA graphs off",
        ("--enforce-eager",),
        ("--disable-cuda-graph",),
        Switch("enforce_eager", True),
    ),
    Row(
        "CUDA graphs",
        ("--cudagraph-capture-sizes",),
        ("--cuda-graph-bs",),
        Same("cudagraph_capture_sizes"),
    ),
    Row(
        "CUDA graphs",
        ("--max-cudagraph-capture-size",),
        ("--cuda-graph-max-bs",),
        RefusedFlag("say which sizes there are: --cudagraph-capture-sizes"),
    ),
    Row("scheduling", ("--scheduling-policy",), ("--schedule-policy",), Same("scheduling_policy")),
    Row("events", ("--stream-interval",), ("--stream-interval",), Same("stream_interval")),
    Row("HTTP processes", ("--api-server-count", "-asc"), (), Same("frontend_procs")),
    Row(
        "tokenizers",
        ("--renderer-num-workers",),
        ("--tokenizer-worker-num",),
        Same("tokenizer_procs"),
    ),
    Row(
        "tokenizers",
        (),
        ("--enable-dynamic-batch-tokenizer", "--enable-tokenizer-batch-encode"),
        Already(),
    ),
    Row(
        "texts encoded together",
        (),
        ("--dynamic-batch-tokenizer-batch-size",),
        Same("tokenizer_max_batch_size"),
    ),
    Row(
        "wait of a batch of texts",
        (),
        ("--dynamic-batch-tokenizer-batch-timeout",),
        Same("tokenizer_batch_wait_ms", milliseconds),
    ),
    Row(
        "threads that prepare",
        (),
        ("--preprocessing-thread-pool-workers",),
        Unused("processes prepare requests: --tokenizer-procs, and --preprocess-procs for images"),
    ),
    Row("detokenizers", (), ("--detokenizer-worker-num",), Same("detokenizer_procs")),
    Row("tool calls", ("--enable-auto-tool-choice",), (), Already()),
    Row("tool calls", ("--tool-call-parser",), ("--tool-call-parser",), Same("tool_call_parser")),
    Row("reasoning", ("--reasoning-parser",), ("--reasoning-parser",), Same("reasoning_parser")),
    Row("chat template", ("--chat-template",), ("--chat-template",), Same("chat_template")),
    Row("chat template", ("--default-chat-template-kwargs",), (), RefusedFlag(ON_REQUESTS)),
    Row(
        "chat template",
        ("--trust-request-chat-template",),
        (),
        Switch("trust_request_chat_template", True),
    ),
    Row(
        "structured output",
        ("--structured-outputs-config.backend", "--structured-outputs-config"),
        ("--grammar-backend",),
        RefusedFlag("leave it out: there is one"),
    ),
    Row(
        "adapters",
        ("--lora-modules",),
        ("--lora-paths",),
        Same("lora_modules"),
    ),
    Row("adapters", ("--max-loras",), ("--max-loras-per-batch",), Same("max_loras")),
    Row("adapters", ("--max-cpu-loras",), ("--max-loaded-loras",), Same("max_cpu_loras")),
    Row("adapters", ("--max-lora-rank",), ("--max-lora-rank",), Same("max_lora_rank")),
    Row("adapters", ("--lora-dtype",), (), Same("lora_dtype")),
    Row(
        "adapters",
        (),
        ("--lora-target-modules", "--lora-backend", "--lora-eviction-policy"),
        Unused("each adapter says what it changes"),
    ),
    Row(
        "speculation",
        ("--speculative-config",),
        (),
        SeveralFlags(("speculative", "draft_model", "num_speculative_tokens"), speculation),
    ),
    Row(
        "speculation",
        (),
        ("--speculative-algorithm",),
        Same(
            "speculative",
            spelled(
                {"NGRAM": "ngram", "STANDALONE": "draft_model", "NEXTN": "mtp", "EAGLE3": "eagle3"}
            ),
        ),
    ),
    Row(
        "speculation",
        (),
        ("--speculative-num-steps", "--speculative-eagle-topk"),
        RefusedFlag("leave it out: what pays is measured"),
    ),
    Row(
        "speculation",
        (),
        ("--speculative-num-draft-tokens",),
        Same("num_speculative_tokens"),
    ),
    Row("speculation", (), ("--speculative-draft-model-path",), Same("draft_model")),
    Row(
        "attention",
        ("--attention-backend",),
        ("--attention-backend",),
        Same("attention_backend", ATTENTION_BACKENDS),
    ),
    Row(
        "images",
        ("--limit-mm-per-prompt",),
        ("--limit-mm-data-per-request",),
        Same("max_images", max_images),
    ),
    Row("images", ("--allowed-media-domains",), (), Same("allowed_media_domains")),
    Row("images", ("--allowed-local-media-path",), (), RefusedFlag(NO_FILES)),
    Row("images", ("--mm-processor-cache-gb",), (), Same("image_memory_bytes", from_gib)),
    Row("keys", ("--api-key",), ("--api-key",), Same("api_key")),
    Row("keys", (), ("--admin-api-key",), Same("admin_api_key")),
    Row("TLS", ("--ssl-certfile",), ("--ssl-certfile",), Same("ssl_certfile")),
    Row("TLS", ("--ssl-keyfile",), ("--ssl-keyfile",), Same("ssl_keyfile")),
    Row(
        "TLS",
        (),
        ("--ssl-keyfile-password",),
        RefusedFlag("decrypt the key and restrict its mode: openssl pkey -in KEY -out KEY2"),
    ),
    Row(
        "TLS",
        ("--enable-ssl-refresh",),
        ("--enable-ssl-refresh",),
        RefusedFlag("restart the server when there is another certificate"),
    ),
    Row(
        "TLS of clients",
        ("--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
        ("--ssl-ca-certs",),
        RefusedFlag("use --api-key, or a reverse proxy that asks for certificates"),
    ),
    Row("pages that may call", ("--allowed-origins",), (), Same("allowed_origins")),
    Row("metrics", ("--disable-log-stats",), ("--enable-metrics",), Already()),
    Row(
        "traces",
        ("--otlp-traces-endpoint",),
        ("--otlp-traces-endpoint",),
        Same("otlp_traces_endpoint"),
    ),
    Row("traces", (), ("--enable-trace",), RefusedFlag("use --otlp-traces-endpoint URL")),
    Row("traces", ("--collect-detailed-traces",), (), Unused("each trace has a span per hop")),
    Row("access log", ("--disable-uvicorn-access-log",), (), Switch("access_log", False)),
    Row(
        "sampling defaults",
        ("--generation-config",),
        ("--sampling-defaults",),
        Same("generation_config", spelled({"model": "auto", "openai": "vllm"})),
    ),
    Row("stopping", ("--shutdown-timeout",), (), Same("drain_timeout")),
    Row("watchdog", (), ("--watchdog-timeout",), Same("watchdog_timeout")),
    Row(
        "watchdog",
        (),
        ("--soft-watchdog-timeout",),
        RefusedFlag("use --watchdog-timeout; crash reports have the stacks of a silent process"),
    ),
    Row("request log", ("--disable-log-requests", "--no-enable-log-requests"), (), Already()),
    Row(
        "request log",
        ("--enable-log-requests",),
        ("--log-requests", "--log-requests-level"),
        RefusedFlag("use --access-log, which has no texts"),
    ),
    Row("log", ("--uvicorn-log-level",), ("--log-level",), Same("log_level")),
    Row("seed", ("--seed",), ("--random-seed",), Same("seed")),
    Row(
        "prefill elsewhere",
        ("--kv-transfer-config",),
        ("--disaggregation-mode", "--disaggregation-transfer-backend"),
        RefusedFlag("prompts are computed where their texts are"),
    ),
    Row("sleep", ("--enable-sleep-mode",), (), Already()),
    Row(
        "sleep",
        (),
        ("--enable-memory-saver",),
        RefusedFlag("POST /admin/models/NAME/sleep gives memory back"),
    ),
    Row("KV offload", ("--kv-offloading-size",), (), Same("kv_store_bytes", from_gib)),
    Row("KV offload", ("--kv-offloading-backend",), (), Already(("native",), HOST_TIER)),
    Row(
        "KV offload",
        (),
        ("--enable-hierarchical-cache", "--hicache-ratio", "--hicache-size"),
        RefusedFlag(HOST_TIER),
    ),
    Row(
        "weight offload",
        ("--cpu-offload-gb",),
        ("--cpu-offload-gb",),
        RefusedFlag("use --quantization, or more GPUs by --tp"),
    ),
]

ALIASES: dict[str, Meaning] = {
    **{name: row.meaning for row in ROWS for name in (*row.vllm, *row.sglang)},
    **dict.fromkeys(("-md", "--model-draft"), Same("draft_model")),  # llama.cpp's,
    "--models-max": Same("max_loaded_models"),  # and this
}


def ours(row: Row) -> str:
    """Return what a row is here, in a table's words."""
    match row.meaning:
        case Same("model"):
            return "MODEL"
        case Same(field):
            return f"`{flag_name(field)}`"
        case SeveralFlags(fields):
            return " ".join(f"`{flag_name(field)}`" for field in fields)
        case Switch(field, on):
            return f"`{flag_name(field)}`" if on else f"`{flag_name('no_' + field)}`"
        case Already(values, instead) if values:
            return f"taken as {', '.join(values)}; else {instead}"
        case Already():
            return "taken: it is so anyhow"
        case Unused(why):
            return f"taken, and changes nothing: {why}"
        case RefusedFlag(instead):
            return f"none; {instead}"


def migration_table() -> str:
    """Return the table of `docs/migration.md`."""
    lines = ["| | vLLM | SGLang | Headrace |", "| --- | --- | --- | --- |"]
    for row in ROWS:
        theirs = [" ".join(f"`{name}`" for name in names) for names in (row.vllm, row.sglang)]
        lines.append(f"| {row.purpose} | {theirs[0]} | {theirs[1]} | {ours(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(migration_table(), end="")
