"""A command line, in our words or in others', becomes a configuration, or one line of refusal."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.config.config import ServerConfig
from headrace.config.flag_values import flag_name
from headrace.config.flags import (
    FIELDS,
    GROUPS,
    configs_from_flags,
    from_flags,
    own_flags,
    server_parser,
)
from headrace.config.foreign_flags import (
    ALIASES,
    ROWS,
    Already,
    RefusedFlag,
    Same,
    Switch,
    Unused,
    migration_table,
)
from headrace.errors import ConfigError

MIGRATION = Path(__file__).parents[3] / "docs/migration.md"


def changed(*argv: str) -> dict[str, Any]:
    """Return what a command line changes."""
    config, plain = from_flags(argv), ServerConfig()
    return {k: v for k, v in dataclasses.asdict(config).items() if v != getattr(plain, k)}


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as refused:
        from_flags(argv)
    return str(refused.value)


def test_no_flags_are_the_defaults() -> None:
    assert from_flags([]) == ServerConfig()


def test_every_field_is_a_flag_with_help_in_a_group() -> None:
    text = server_parser().format_help()
    for field in dataclasses.fields(ServerConfig):
        assert field.metadata["help"]
        if field.name != "model":
            assert f"  {flag_name(field.name)}" in text
    assert GROUPS.keys() <= FIELDS.keys()
    assert next(iter(FIELDS)) == next(iter(GROUPS)), "so that each field has a group"
    for title in GROUPS.values():
        assert text.count(f"\n{title}:\n") == 1


def test_help_is_a_line_or_two_for_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = server_parser().format_help()
    flags = re.split(r"^  (?=-|MODEL)", text, flags=re.MULTILINE)[1:]
    lines = [len(flag.split("\n\n")[0].strip().split("\n")) for flag in flags]
    assert len(flags) == len(FIELDS) + len(["--help", "--version", "--config"])
    assert sum(lines) <= 1.6 * len(flags)


def test_flags_have_the_types_of_their_fields() -> None:
    config = from_flags(["org/model", "--max-model-len", "128", "--served-model-name=5"])
    assert (config.model, config.max_model_len, config.served_model_name) == ("org/model", 128, "5")
    assert changed("--api-key", "a", "--api-key", "b") == {"api_key": ("a", "b")}
    assert changed("--no-enable-prefix-caching") == {"enable_prefix_caching": False}


def test_sizes_may_be_short_and_underscores_hyphens() -> None:
    assert changed("--max_model_len", "32k") == {"max_model_len": 32000}
    assert changed("--kv-cache-memory-bytes=4G") == {"kv_cache_memory_bytes": 4 << 30}
    assert changed("--gpu-memory-utilization", ".5") == {"gpu_memory_utilization": 0.5}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--max-num", "1"], "--max-num is not known; did you mean --max-num-seqs?"),
        (["--context-lengt=1"], "--context-lengt is not known; did you mean --context-length?"),
        (["--zzzz"], "--zzzz is not known; --help lists all flags"),
        (["a", "b"], "this command takes one MODEL; 2 are given: a, b"),
        (["--port", "x"], "argument --port: x is not a whole number"),
        (["--port"], "--port needs a value"),
        (["--cuda-graph-bs", "--port", "1"], "argument --cudagraph-capture-sizes: --port is not a"),
        (["--cuda-graph-bs"], "--cuda-graph-bs needs a value"),
        (["--cuda-graph-bs", "0"], "--cudagraph-capture-sizes 0 is too small; it must be at "),
        (["--log-level", "loud"], "--log-level loud is not known; it must be one of debug, info, "),
        (
            ["--tool-call-parser", "x"],
            "--tool-call-parser x is not known; it must be one of auto, none, hermes, ",
        ),
    ],
)
def test_what_is_no_flag_is_refused_with_the_nearest(argv: list[str], text: str) -> None:
    assert refusal(*argv).startswith(text)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--model-path m --tp-size 2 --context-length 9",
         {"model": "m", "tp": 2, "max_model_len": 9}),
        ("--max-running-requests 8 --random-seed 3", {"max_num_seqs": 8, "seed": 3}),
        ("--chunked-prefill-size 256 --disable-radix-cache",
         {"max_num_batched_tokens": 256, "enable_prefix_caching": False}),
        ("--tokenizer-worker-num 2 --detokenizer-worker-num 3 --schedule-policy lpm",
         {"tokenizer_procs": 2, "detokenizer_procs": 3, "scheduling_policy": "lpm"}),
        ("--kv-cache-dtype bf16 --quantization w8a8_int8 --speculative-algorithm NGRAM",
         {"kv_cache_dtype": "bfloat16", "quantization": "int8", "speculative": "ngram"}),
        ("m -asc 2 --renderer-num-workers 4 -q gguf --dtype float --uvicorn-log-level error",
         {"model": "m", "frontend_procs": 2, "tokenizer_procs": 4, "dtype": "float32",
          "log_level": "error"}),
        ("-tp 2 -pp 3 -dp=1 --max-num-queued-reqs 5 --enforce-eager --enable-chunked-prefill",
         {"tp": 2, "pp": 3, "max_num_queued": 5, "enforce_eager": True}),
        ("--cudagraph-capture-sizes 1 2 4 m --disable-cuda-graph",
         {"cudagraph_capture_sizes": (1, 2, 4), "model": "m", "enforce_eager": True}),
        ("m --cuda_graph_bs 8 --cudagraph-capture-sizes=16 --port 1",
         {"model": "m", "cudagraph_capture_sizes": (8, 16), "port": 1}),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":4}',
         {"speculative": "ngram", "num_speculative_tokens": 4}),
        ('--speculative-config {"model":"d","num_speculative_tokens":4}',
         {"speculative": "draft_model", "draft_model": "d", "num_speculative_tokens": 4}),
        ("--speculative-algorithm STANDALONE --speculative-draft-model-path d",
         {"speculative": "draft_model", "draft_model": "d"}),
        ('--speculative-config {"method":"self","quantization":"q4"}', {"speculative": "self"}),
        ('--speculative-config {"method":"mtp","num_speculative_tokens":2}',
         {"speculative": "mtp", "num_speculative_tokens": 2}),
        ('--speculative-config {"method":"qwen3_next_mtp"}', {"speculative": "mtp"}),
        ("--speculative-algorithm NEXTN", {"speculative": "mtp"}),
        ('--speculative-config {"method":"eagle3","model":"d","num_speculative_tokens":3}',
         {"speculative": "eagle3", "draft_model": "d", "num_speculative_tokens": 3}),
        ("--speculative-algorithm EAGLE3 --speculative-draft-model-path d",
         {"speculative": "eagle3", "draft_model": "d"}),
        ("m -md d", {"model": "m", "speculative": "draft_model", "draft_model": "d"}),
        ('--hf_overrides {"method":"x"} --task score', {"hf_overrides": '{"method":"x"}'}),
        ('--json-model-override-args {"a":[]}', {"hf_overrides": '{"a":[]}'}),
        ("--attention-backend FLASHINFER --dtype half",
         {"attention_backend": "flashinfer", "dtype": "float16"}),
        ('--enable-lora --lora-paths a=b {"name":"c","path":"d"} --max-loras-per-batch 2',
         {"enable_lora": True, "lora_modules": ("a=b", '{"name":"c","path":"d"}'),
          "max_loras": 2}),
        ('--limit-mm-per-prompt {"image":3} --mm-processor-cache-gb 0.25',
         {"max_images": 3, "image_memory_bytes": 256 << 20}),
        ("--kv-offloading-size 1.5 --kv-offloading-backend native",
         {"kv_store_bytes": 3 << 29}),
    ],
)  # fmt: skip
def test_flags_of_vllm_and_sglang_are_understood(argv: str, expected: dict[str, Any]) -> None:
    assert changed(*argv.split()) == expected


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            "--gpu-memory-utilization 1.5",
            "--gpu-memory-utilization 1.5 is not a share; it must be above 0 and at most 1",
        ),
        ("--gpu-memory-utilization x", "argument --gpu-memory-utilization: x is not a number"),
        ("--mem-fraction-static=0.8", "--mem-fraction-static is not supported; use --gpu-mem"),
        ("-pp 9", "--pp 9 is too large; it must be at most 8"),
        ("--pp 2 --enable-lora", "--pp 2 does not go with --enable-lora; leave out one"),
        ("--nnodes 2", "--nnodes 2 is not supported; run one server per machine, behind a load b"),
        ("--lora-modules a=b", "--lora-modules needs --enable-lora"),
        ("--enable-lora --lora-modules a", "--lora-modules a is not NAME=PATH, nor JSON with name"),
        ("--enable-lora --lora-modules a=b a=c", "--lora-modules names a twice"),
        ("--max-loras 8 --max-cpu-loras 4", "--max-cpu-loras 4 is too small; it must be at le"),
        ('--limit-mm-per-prompt {"video":3}', '{"video":3} says nothing of images; use --max-i'),
        ("--mm-processor-cache-gb x", "x is not a number of GiB"),
        ("--chunked-prefill-size -1", "--chunked-prefill-size -1 is not supported; raise --max-"),
        ('--speculative-config {"method":"eagle"}', "--speculative-config with method eagle is "),
        ("--speculative-config x", "--speculative-config is not a JSON object: "),
        ("--speculative draft_model", "--speculative draft_model and --draft-model None: a draft "),
        (
            '--speculative-config {"method":"self","quantization":"q2"}',
            "--speculative-config with quantization q2 is not supported; use q4",
        ),
        ("--hf-overrides {x", "--hf-overrides '{x' is not a JSON object: "),
        ("--hf-overrides {} --model-impl transformers", "--hf-overrides does not go with "),
        ("-md d --speculative ngram", "--speculative ngram and --draft-model d: a draft model "),
        ("--num-speculative-tokens 16", "--num-speculative-tokens 16 is too large; it must be at"),
    ],
)
def test_what_is_not_there_is_refused_with_what_to_do(argv: str, text: str) -> None:
    assert refusal(*argv.split()).startswith(text)


def test_every_alias_leads_somewhere() -> None:
    for name, meaning in ALIASES.items():
        match meaning:
            case Same(field) | Switch(field):
                assert field in FIELDS, name
            case Already(values, instead):
                assert bool(values) == bool(instead), name
                assert from_flags([name, *values[:1]]) == ServerConfig()
            case Unused(why):
                assert why
                assert from_flags([name, "4"]) == ServerConfig()
            case RefusedFlag(instead):
                assert name not in own_flags(), f"{name} is built: it is no longer refused"
                assert refusal(name) == f"{name} is not supported; {instead}"


def test_batch_tokenizer_flags_of_sglang_are_ours() -> None:
    switches = ["--enable-dynamic-batch-tokenizer", "--enable-tokenizer-batch-encode"]
    assert from_flags(switches) == ServerConfig()
    size = ["--dynamic-batch-tokenizer-batch-size", "8"]
    assert from_flags(size).tokenizer_max_batch_size == 8
    for seconds, wait_ms in (("0.002", 2), ("0", 0), ("0.0005", 1), ("1", 1000)):
        timeout = [f"--dynamic-batch-tokenizer-batch-timeout={seconds}"]
        assert from_flags(timeout).tokenizer_batch_wait_ms == wait_ms
    assert refusal("--dynamic-batch-tokenizer-batch-timeout", "x").startswith("x is not a number")


def test_flag_that_changes_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert from_flags(["--preprocessing_thread_pool_workers", "4"]) == ServerConfig()
    (line,) = caplog.messages
    assert line.startswith("--preprocessing-thread-pool-workers 4 changes nothing: processes ")


def test_a_spelling_means_one_thing() -> None:
    meanings: dict[str, Any] = {}
    for row in ROWS:
        for name in {*row.vllm, *row.sglang}:
            assert meanings.setdefault(name, row.meaning) == row.meaning, name


def test_the_migration_table_is_that_of_the_aliases() -> None:
    assert migration_table() in MIGRATION.read_text(), (
        "python -m headrace.config.foreign_flags prints it"
    )


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_gives_flags_and_flags_win(tmp_path: Path) -> None:
    path = write(
        tmp_path / "flags.yaml",
        "model: org/m\nport: 9000\nmax_num_seqs: 8\ncontext-length: 64\nenable-prefix-caching: no\n"
        "api-key: [one, two]\nspeculative-config: {method: ngram}\n"
        "trust-request-chat-template: on\n",
    )
    told = changed("--config", str(path), "--port", "9001", "--api-key", "three")
    assert told == {
        "model": "org/m",
        "port": 9001,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "api_key": ("three",),
        "speculative": "ngram",
        "trust_request_chat_template": True,
    }
    assert changed(f"--config={path}", "org/n")["model"] == "org/n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max-num-sq: 1", "max-num-sq is not known; did you mean max-num-seqs?"),
        ("config: other.yaml", "config is not known; did you mean "),
        ("port:", "port has no value"),
        ("port: nine", "argument --port: nine is not a whole number"),
        ("nnodes: 2", "--nnodes 2 is not supported; run one"),
        ("- port", "cannot be read: "),
        ("{", "cannot be read: "),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal("--config", str(write(tmp_path / "flags.yaml", text)))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert refusal("--config", str(path)).startswith(f"--config {path} cannot be read: ")


def test_json_is_yaml(tmp_path: Path) -> None:
    path = write(tmp_path / "flags.json", json.dumps({"max-num-seqs": 3, "uds": "/run/x"}))
    assert changed("--config", str(path)) == {"max_num_seqs": 3, "uds": "/run/x"}


def test_replicas_may_be_one_per_numa_node() -> None:
    for argv in (["--data-parallel-size", "auto"], ["--dp=auto"]):
        assert from_flags(argv, num_nodes=3).data_parallel_size == 3
    assert refusal("--dp", "many").endswith("many is not a whole number")


def test_models_share_the_flags_of_the_command_line() -> None:
    configs = configs_from_flags(["a", "b", "--max-num-seqs", "3"])
    assert [(one.model, one.max_num_seqs) for one in configs] == [("a", 3), ("b", 3)]


def test_models_of_a_file_have_flags_of_their_own(tmp_path: Path) -> None:
    text = "port: 7\ntp: 2\nmodels: [a, {model: b, tp: 1, served-model-name: other}]"
    path = str(write(tmp_path / "flags.yaml", text))
    configs = configs_from_flags(["--config", path])
    found = [(one.model, one.served_model_name, one.tp, one.port) for one in configs]
    assert found == [("a", None, 2, 7), ("b", "other", 1, 7)]
    (config,) = configs_from_flags(["c", "--config", path])
    assert (config.model, config.port) == ("c", 7), "the command line wins"


def test_models_have_tokenizers_and_images_of_their_own(tmp_path: Path) -> None:
    text = "models: [{model: a, tokenizer_mode: mistral}, {model: b, max_images: 0}]"
    first, second = configs_from_flags(["--config", str(write(tmp_path / "flags.yaml", text))])
    assert (first.tokenizer_mode, second.tokenizer_mode) == ("mistral", "auto")
    assert first.max_images > second.max_images == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("models: [{model: a, port: 1}, b]", "models[0]: port is a flag of the server; give it"),
        ("models: [a, {tpp: 1}]", "models[1]: tpp is not known; did you mean tp?"),
        ("models: a", "models is a list of models, each a name, or its flags with its name"),
        ("{model: a, models: [b]}", "has model and models; give one of them"),
        ("{model_path: a, models: [b]}", "has model and models; give one of them"),
        ("{models: [a, b], mmproj: x}", "--mmproj goes with one model; run a server for each"),
        ("{models: [a, b], enable_lora: true}", "--enable-lora goes with one model; run a server"),
        ("{models: [a, b], draft_model: x}", "--draft-model is for one of several models; give"),
    ],
)
def test_models_with_flags_that_cannot_be_are_refused(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert expected in refusal("--config", str(write(tmp_path / "flags.yaml", text)))


def test_models_on_a_gpu_share_its_memory() -> None:
    flags = ["a", "b", "--gpu-memory-utilization"]
    assert len(configs_from_flags([*flags, "0.5"], has_gpus=True)) == 2
    with pytest.raises(ConfigError, match=r"of 2 models on the same GPU is 1\.2 together"):
        configs_from_flags([*flags, "0.6"], has_gpus=True)


def test_a_broken_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"flags\.yaml cannot be read: .* line 2") as failure:
        from_flags(["--config", str(tmp_path / "flags.yaml")])
    assert "\n" not in str(failure.value)
