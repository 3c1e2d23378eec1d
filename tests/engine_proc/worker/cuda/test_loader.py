"""`--device cuda` loads a model into kernels, or says why it cannot."""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from decoder_cases import decoder_case
from embedding_models import LAST, add_modules
from engine_configs import execution_config
from tiny_models import make_byte_folder

from headrace.config.process_configs import WorkerConfig
from headrace.engine_proc.worker.backend_selection import TRANSFORMERS, foresee
from headrace.engine_proc.worker.cuda import cuda_sampler
from headrace.engine_proc.worker.cuda import loader as cuda_loader
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_runner import CudaRunner
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets
from headrace.engine_proc.worker.execution.cache_fingerprint import (
    content_digest,
    content_fingerprint,
)
from headrace.engine_proc.worker.execution.cache_split import STATE_SHARE
from headrace.engine_proc.worker.execution.loaded_model import PAGE_TOKENS
from headrace.engine_proc.worker.execution.runner import EmbeddingRunner, GenerationRunner
from headrace.engine_proc.worker.loader import load
from headrace.errors import ConfigError, HeadraceError, ModelError
from headrace.ipc.worker_messages import Step, StepResult

PAGE_BYTES = 2 * PAGE_TOKENS * 16 * 4  # of one layer and one KV head, in fp32
GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_byte_folder(folder)
    return folder


def config_of(folder: Path, **changes: Any) -> WorkerConfig:
    fields: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "kv_cache_memory_bytes": 7 * PAGE_BYTES + 1,
        "vocab_size": 257,
        "max_num_batched_tokens": 8,
    }
    tower_bytes = changes.pop("tower_bytes", 0)
    execution = execution_config(folder, **fields | changes)
    return WorkerConfig(
        execution=execution, step_fd=-1, result_fd=-1, mask_fd=-1, tower_bytes=tower_bytes
    )


def ignore(done: int, total: int) -> None: ...


def pooling_step(column: bytes, pooled_rows: bytes) -> Step:
    """Return a step whose three tokens are those of `column`, as are their positions."""
    return Step(
        token_ids=column,
        positions=column,
        sequences=bytes(12),
        page_table=bytes(4),
        logit_rows=b"",
        rows=b"",
        pooled_rows=pooled_rows,
    )


@pytest.fixture
def threads() -> Iterator[None]:
    """The loader takes all cores."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("threads")
def test_weights_or_pages_without_room_are_one_clear_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(cuda_loader.CudaExecutor, "take_cache", fail)
    with pytest.raises(ConfigError, match="no room for the weights: use --quantization, a smaller"):
        load(config_of(folder), ignore)


@pytest.mark.usefixtures("threads")
def test_a_model_has_the_pages_that_are_asked_for(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(config_of(folder), ignore)
    assert isinstance(loaded.runner, CudaRunner)
    assert loaded.num_pages == 7
    largest = cuda_loader.largest_step_of(config_of(folder).execution, embeds=False)
    launched: list[str] = []
    for name in ("add_biases", "penalize", "apply_mask", "report"):
        real = getattr(cuda_sampler, name)

        def note(*args: Any, name: str = name, real: Any = real) -> Any:
            launched.append(name)
            return real(*args)

        monkeypatch.setattr(cuda_sampler, name, note)
    masks_of = partial(cuda_loader.all_allowed, vocab_size=257)
    assert len(loaded.runner.run(largest, masks_of).wait().token_ids) == 4 * 2
    # Else the first of a server's requests that needs one would wait for a compiler.
    assert launched == ["add_biases", "penalize", "apply_mask", "apply_mask", "report"]


@pytest.mark.usefixtures("threads")
def test_histories_are_there_when_memory_is_measured(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, real, sizes = config_of(folder), cuda_loader.fit_cache, list[int]()

    def fit_cache(config: WorkerConfig, own_bytes: tuple[int, int], runner: Any, *rest: Any) -> Any:
        sizes.append(len(runner._sampler._histories.tokens))
        return real(config, own_bytes, runner, *rest)

    monkeypatch.setattr(cuda_loader, "fit_cache", fit_cache)
    load(config, ignore)
    assert sizes == [config.execution.max_num_seqs * config.execution.max_model_len]


@pytest.mark.usefixtures("threads")
def test_a_hybrid_has_slots_for_states_beside_pages(device: torch.device) -> None:
    made = decoder_case("lfm2")
    loaded = load(config_of(made.folder, kv_cache_memory_bytes=1 << 16, vocab_size=96), ignore)
    state_bytes, page_bytes = 4 * made.ours.spec.state_numbers, PAGE_TOKENS * 4 * 2 * 2 * 16
    assert loaded.num_states == 3 * 2 > (1 << 16) // STATE_SHARE // state_bytes
    left = (1 << 16) - loaded.num_states * state_bytes
    assert loaded.num_pages == left // page_bytes


@pytest.mark.usefixtures("threads")
def test_a_host_tier_of_a_hybrid_has_states_beside_pages() -> None:
    made = decoder_case("lfm2")
    sizes = {"kv_cache_memory_bytes": 1 << 16, "vocab_size": 96, "kv_store_bytes": 1 << 18}
    fd = os.memfd_create("host pages")
    loaded = load(replace(config_of(made.folder, **sizes), cache_fd=fd), ignore)
    assert loaded.state_bytes == 4 * made.ours.spec.state_numbers
    taken = loaded.num_pages * loaded.page_bytes + loaded.num_states * loaded.state_bytes
    assert loaded.num_host_pages == loaded.num_pages * (1 << 18) // taken
    assert loaded.num_host_states == loaded.num_states * (1 << 18) // taken
    os.close(fd)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("kv_store_bytes", "num_states", "text"),
    [
        (1 << 12, 9, "has no room for a page of .* bytes and a state of"),
        (1 << 20, 2, "copies of states need a slot beside the 2 that a sequence has"),
    ],
)
def test_a_host_tier_without_room_for_states_is_one_clear_line(
    kv_store_bytes: int, num_states: int, text: str
) -> None:
    loaded: Any = SimpleNamespace(num_pages=10, num_states=num_states)
    with pytest.raises(ConfigError, match=f"--kv-store-bytes {kv_store_bytes}.*{text}"):
        cuda_loader.host_split(kv_store_bytes, loaded, (1 << 12, 1 << 12))


class Card:
    """A `DeviceMemory` of 20 GiB."""

    def free_and_total(self) -> tuple[int, int]:
        return 20 * GIB, 20 * GIB

    def held(self) -> int:
        return 0

    def peak_held(self) -> int:
        return 0

    def trim(self) -> None: ...


@pytest.mark.usefixtures("threads")
def test_a_host_tier_outlives_workers_of_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = os.memfd_create("host pages")
    sizes = {"kv_store_bytes": 5 * PAGE_BYTES + 1}

    def cache_id(**changes: Any) -> bytes:
        loaded = load(replace(config_of(folder, **sizes | changes), cache_fd=fd), ignore)
        assert loaded.num_host_pages == 5 and loaded.page_bytes == PAGE_BYTES
        copier: Any = loaded.copier
        copier._memory.close()
        return loaded.cache_id

    first = cache_id()
    assert cache_id() == first
    others = [cache_id(attention_backend="triton")]
    monkeypatch.setattr(torch, "__version__", "another")
    others.append(cache_id())
    monkeypatch.undo()
    monkeypatch.setattr(cuda_loader, "numerics_of", lambda *_: "sm_80")
    others.append(cache_id())
    assert len({first, *others}) == 4
    os.close(fd)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_store_bytes": 1}, f"--kv-store-bytes 1 has no room for a page of {PAGE_BYTES} bytes"),
        ({"kv_store_bytes": 1 << 60}, "is pinned as a whole for GPUs, more than the"),
        ({"kv_store": "folder"}, "--kv-store folder: pages of GPUs reach it through memory"),
    ],
)
def test_a_host_tier_that_cannot_be_is_one_clear_line(
    changes: dict[str, Any], text: str, folder: Path
) -> None:
    fd = os.memfd_create("host pages")
    with pytest.raises(ConfigError, match=text):
        load(replace(config_of(folder, **changes), cache_fd=fd), ignore)
    os.close(fd)


def test_what_a_store_keeps_of_gpus_is_not_found_by_cpus(folder: Path) -> None:
    execution = config_of(folder).execution
    content = content_digest(execution)
    gpus = [cuda_loader.numerics_of(torch.device("cpu"), execution), "sm_80", "sm_90", ""]
    assert len({content_fingerprint(execution, content, numerics) for numerics in gpus}) == 4


@pytest.mark.parametrize(("num_pages", "fits"), [(7, True), (21, False)])
def test_a_worker_that_starts_anew_has_as_many_pages(
    folder: Path, num_pages: int, *, fits: bool
) -> None:
    """The engine goes on with those of the worker before."""
    config = replace(config_of(folder, kv_cache_memory_bytes=None), num_pages=num_pages)
    config = replace(config, num_states=4)
    runner: Any = SimpleNamespace(run=lambda step, masks_of: None)
    count = partial(
        cuda_loader.fit_cache, config, (GIB, 1), runner, Buckets(()), None, Card(), 20 * GIB
    )
    if fits:
        assert count() == (num_pages, 4)
    else:
        with pytest.raises(ConfigError, match=r"the workers before had .* of cache on this GPU"):
            count()


def test_prompts_shorter_than_a_step_warm_wide_tiles(folder: Path) -> None:
    """Llama 3 8B on 4 GPUs: two prompts of 4,096 tokens have wide tiles, and one has not."""
    largest = {"max_model_len": 4096, "max_num_batched_tokens": 8192, "max_num_seqs": 256}
    config = replace(config_of(folder, **largest), num_pages=1)
    steps: list[Step] = []
    runner: Any = SimpleNamespace(run=lambda step, masks_of: steps.append(step))
    cuda_loader.fit_cache(config, (GIB, 0), runner, Buckets(()), None, Card(), 20 * GIB)
    tiling = Tiling(wide_rows=128, enough_programs=264)
    numbers = {(step.num_tokens, len(step.logit_rows) // 4) for step in steps}
    assert 128 in {tiling.rows_for(4, 2, *of_step) for of_step in numbers}
    # None waits for a compiler because it has the first bias, penalty or mask.
    assert all(step.bias and step.history_updates and step.masked_rows for step in steps)


@pytest.mark.parametrize("is_prefix_lm", [False, True])
def test_steps_whose_tokens_see_each_other_warm_their_kernels(
    folder: Path, *, is_prefix_lm: bool
) -> None:
    config = config_of(folder, is_prefix_lm=is_prefix_lm, max_num_batched_tokens=80)
    config = replace(config, num_pages=1)
    steps: list[Step] = []
    runner: Any = SimpleNamespace(run=lambda step, masks_of: steps.append(step))
    cuda_loader.fit_cache(config, (GIB, 0), runner, Buckets(()), None, Card(), 20 * GIB)
    plain = {step.token_ids for step in steps if not step.last_seen}
    whole = {step.token_ids for step in steps if step.last_seen}
    assert whole == (plain if is_prefix_lm else set())
    for step in steps:
        seen = torch.frombuffer(bytearray(step.last_seen or b"1234"), dtype=torch.int32)
        assert not step.last_seen or set(seen.tolist()) == {63}  # all sequences end there


@pytest.mark.usefixtures("threads")
def test_an_embedding_model_makes_vectors(tmp_path: Path) -> None:
    make_byte_folder(tmp_path)
    add_modules(tmp_path, LAST, "Normalize")
    ours, theirs = (
        load(config_of(tmp_path, device=device, kv_cache_dtype="float32"), ignore)
        for device in ("cuda", "cpu")
    )
    assert isinstance(ours.runner, EmbeddingRunner)
    column = torch.tensor([0, 1, 2], dtype=torch.int32).numpy().tobytes()
    last = torch.tensor([2], dtype=torch.int32).numpy().tobytes()
    step = pooling_step(column, last)
    found, expected = (
        torch.frombuffer(bytearray(loaded.runner.run(step).embeddings), dtype=torch.float32)
        for loaded in (ours, theirs)
    )
    assert len(found) == 32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("threads")
def test_what_is_stored_in_float16_runs_in_it(tmp_path: Path) -> None:
    make_byte_folder(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    model.save_pretrained(tmp_path)
    add_modules(tmp_path, LAST)
    column = torch.tensor([0, 1, 2], dtype=torch.int32).numpy().tobytes()
    step = pooling_step(column, column)
    vectors = {}
    for device, dtype in (
        ("cpu", "float32"), ("cuda", "auto"), ("cuda", "float16"), ("cuda", "bfloat16"),
    ):  # fmt: skip
        kv_dtype = "float32" if device == "cpu" else "auto"
        config = config_of(tmp_path, device=device, dtype=dtype, kv_cache_dtype=kv_dtype)
        embeddings = load(config, ignore).runner.run(step).embeddings
        vectors[device, dtype] = torch.frombuffer(bytearray(embeddings), dtype=torch.float32)
    exact = vectors.pop(("cpu", "float32"))
    errors = {dtype: (x - exact).abs().max().item() for (_, dtype), x in vectors.items()}
    assert torch.equal(vectors["cuda", "auto"], vectors["cuda", "float16"])
    assert 0 < errors["float16"] < 0.01
    assert errors["bfloat16"] > 3 * errors["float16"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quantization": "int8"}, "--quantization int8 is for CPUs; use --device cpu"),
        ({"kv_cache_dtype": "bfloat16"}, "is not that of the weights, float32"),
        ({"attention_backend": "flashinfer"}, "flashinfer: the model's heads have 16 numbers"),
        ({"device": "cpu", "attention_backend": "triton"}, "triton is for GPUs, and the model"),
        ({"device": "cpu", "dtype": "float16"}, "--dtype float16 is for GPUs, .*; use bfloat16 or"),
    ],
)
def test_what_gpus_cannot_do_is_refused(changes: dict[str, Any], text: str, folder: Path) -> None:
    with pytest.raises((ConfigError, ModelError), match=text):
        load(config_of(folder, **changes), ignore)


@pytest.mark.usefixtures("threads")
def test_modules_of_transformers_take_a_gpu(
    folder: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(folder, model_impl="transformers")
    with caplog.at_level(logging.INFO):
        loaded = load(config, ignore)
    assert "transformers' modules run on GPUs: --device says so" in caplog.messages
    assert isinstance(loaded.runner, GenerationRunner)
    assert loaded.num_pages == 14  # in bfloat16 on the CPU, as is `auto` there
    largest = cuda_loader.largest_step_of(config.execution, embeds=False)
    masks_of = partial(cuda_loader.all_allowed, vocab_size=257)
    assert len(loaded.runner.run(largest, masks_of).token_ids) == 4 * 2
    with pytest.raises(ModelError, match="run on one GPU, not on --tp 2; use --device cpu"):
        load(config_of(folder, model_impl="transformers", tp=2), ignore)


def test_what_our_own_code_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 32}'
    )
    with pytest.raises(
        ModelError, match=r"a mixtral model lacks .*; nor can transformers run it: "
    ):
        load(config_of(tmp_path), ignore)
    with pytest.raises(ModelError, match=r"a mixtral model lacks '[a-z_]*'$"):
        load(config_of(tmp_path, model_impl="headrace"), ignore)
    told = foresee(execution_config(tmp_path, device="cuda"))
    assert told.executor == TRANSFORMERS
    assert told.why.endswith("; on GPUs: --device says so")


@pytest.mark.usefixtures("threads")
def test_weights_can_be_made_up(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    column = torch.tensor([0, 1, 2], dtype=torch.int32).numpy().tobytes()
    last = torch.tensor([2], dtype=torch.int32).numpy().tobytes()
    add_modules(tmp_path, LAST, "Normalize")
    step = Step(
        token_ids=column,
        positions=column,
        sequences=bytes(12),
        page_table=bytes(4),
        logit_rows=b"",
        rows=b"",
        pooled_rows=last,
    )
    flags = {"load_format": "dummy", "kv_cache_dtype": "float32"}
    ours, theirs = (
        load(config_of(tmp_path, device=device, **flags), ignore).runner.run(step).embeddings
        for device in ("cuda", "cpu")
    )
    ours, theirs = (torch.frombuffer(bytearray(x), dtype=torch.float32) for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("flag", ["quantization", "kv_cache_dtype"])
def test_8_bit_floats_are_for_gpus_that_have_them(
    flag: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folder, device="cpu", dtype="auto", **{flag: "fp8"})
    with pytest.raises(ConfigError, match="fp8 is for GPUs, and the model runs on the CPU"):
        load(config, ignore)
    with pytest.raises(HeadraceError, match=r"fp8"):
        foresee(replace(config.execution, model_impl="transformers"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "A100")
    with pytest.raises(ModelError, match="fp8 need Ada or newer, not A100"):
        cuda_loader.check_fp8(config.execution, torch.device("cuda"))
    cuda_loader.check_fp8(config.execution, torch.device("cpu"))


@pytest.mark.usefixtures("threads")
def test_8_bit_floats_are_what_the_flags_say(folder: Path, device: torch.device) -> None:
    config = config_of(folder, dtype="auto", quantization="fp8", kv_cache_dtype="fp8")
    loaded = load(config, ignore)
    assert loaded.num_pages == 4 * 7
    assert isinstance(loaded.runner, CudaRunner)


class Gpu:
    """Memory of a GPU, weights and one page loaded."""

    def __init__(self, free: int) -> None:
        self.free = free

    def free_and_total(self) -> tuple[int, int]:
        return self.free, 10 * GIB

    def held(self) -> int:
        return 2 * GIB

    def peak_held(self) -> int:
        return 3 * GIB

    def trim(self) -> None: ...


class Steps:
    """A runner that counts them, and an executor whose pages take 1 MiB."""

    page_bytes = 1 << 20

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def run(self, step: Step, _masks_of: Any = None) -> StepResult:
        self.num_tokens.append(len(step.token_ids) // 4)
        return StepResult(b"")


def count(folder: Path, free: int, **changes: Any) -> int:
    config, steps = config_of(folder, **changes), Steps()
    num_pages, _ = cuda_loader.fit_cache(
        config, (Steps.page_bytes, 0), steps, Buckets(()), None, Gpu(free), 9 * GIB
    )
    most = config.execution.max_num_batched_tokens
    first, length = [size for size in (1, 64, 256) if size < most], config.execution.max_model_len
    whole_prompts = [most // length * length] if most > length else []
    assert steps.num_tokens == [*first, *whole_prompts, most, most, most]
    return num_pages


def test_pages_take_what_the_largest_step_leaves(folder: Path) -> None:
    assert count(folder, 7 * GIB, kv_cache_memory_bytes=None, gpu_memory_utilization=0.5) == 2048
    assert count(folder, 7 * GIB, kv_cache_memory_bytes=GIB) == 1024
    tower = {"gpu_memory_utilization": 0.5, "tower_bytes": GIB // 2}
    assert count(folder, 7 * GIB, kv_cache_memory_bytes=None, **tower) == 2048 - 512
    many = {"max_num_seqs": 20, "max_num_batched_tokens": 300}
    assert count(folder, 7 * GIB, kv_cache_memory_bytes=GIB, **many) == 1024
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes asks for 8"):
        count(folder, 7 * GIB, kv_cache_memory_bytes=8 * GIB)
    with pytest.raises(ConfigError, match="less than one sequence"):
        count(folder, GIB, kv_cache_memory_bytes=None)
