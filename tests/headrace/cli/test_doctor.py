"""The doctor sees what a machine has, and names what is wrong with it."""

import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_models import minilm
from mmproj_twins import write as write_gguf

from headrace.cli import doctor
from headrace.config.config import ServerConfig
from headrace.config.model_card import find_demo_model, read_card
from headrace.config.process_configs import ModelCard
from headrace.errors import ConfigError, HeadraceError, ModelError
from headrace.model.pooling import Pooling, PoolingKind
from headrace.supervision.engine_groups import EngineGroup
from headrace.system import machine
from headrace.system.all_reduce_policy import Topology
from headrace.system.gpus import Gpu
from headrace.system.machine import Machine, packages

GB = 1 << 30
ON_CPU = "shared memory: the workers are on the CPU"
CPUINFO = """processor\t: 0
model name\t: Fast (R) CPU
flags\t\t: fpu avx2 fma {}

processor\t: 1
model name\t: Fast (R) CPU
"""
NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n"
WELL = Machine(
    processor="Fast",
    isa="avx512",
    is_refused_tiles=False,
    num_cores=16,
    num_usable=8,
    quota=math.inf,
    memory_bytes=64 * GB,
    free_bytes=32 * GB,
    num_numa_nodes=1,
    gpus=[],
    driver=None,
    shm_bytes=GB,
    max_files=4096,
)
CARD = ModelCard(
    path="/m",
    name="m",
    max_model_len=9,
    vocab_size=9,
    eos_token_ids=[],
    chat_template="x",
    special_tokens={},
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_is_seen_as_its_kernel_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = Machine.look(
        write(
            tmp_path,
            {
                "proc/cpuinfo": CPUINFO.format("avx512f"),
                "proc/meminfo": "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n",
                "proc/driver/nvidia/version": NVRM,
                "proc/driver/nvidia/gpus/0000:01/information": "Model: \t NVIDIA H200\nIRQ: 1\n",
                "sys/devices/system/node/node0/x": "",
                "sys/devices/system/node/node1/x": "",
                "sys/fs/cgroup/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/memory.max": f"{3 * GB}\n",
                "sys/fs/cgroup/memory.current": f"{GB}\n",
                "dev/shm/x": "",
            },
        ),
        lambda: "avx512",
    )
    assert (seen.processor, seen.isa, seen.quota) == ("Fast (R) CPU", "avx512", 1.5)
    assert (seen.memory_bytes, seen.free_bytes, seen.num_numa_nodes) == (8 * GB, 2 * GB, 2)
    assert (seen.gpus, seen.driver) == (["NVIDIA H200"], "570.86.15")
    assert seen.shm_bytes is not None
    table = dict(doctor.facts(seen))
    assert table["GPUs"] == "NVIDIA H200, driver 570.86.15"
    assert table["memory"] == "2.0 GiB free of 8.0 GiB"


@pytest.mark.parametrize(
    ("visible", "sees"), [(None, True), ("0,1", True), ("", False), ("-1", False)]
)
def test_gpus_that_are_hidden_are_none(
    visible: str | None, sees: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    write(tmp_path, {"proc/driver/nvidia/gpus/0000:01/information": "Model: \t NVIDIA H200\n"})
    monkeypatch.setattr(machine, "NVIDIA", tmp_path)
    assert machine.has_gpus() == bool(Machine.look(tmp_path).gpus) == sees


@pytest.mark.parametrize(
    ("flags", "isa", "is_refused"),
    [
        ("", "avx2", False),
        ("avx512f", "avx512", False),
        ("avx512f avx512_bf16 avx512vbmi amx_tile amx_bf16 amx_int8", "avx512 with amx", False),
        ("avx512f avx512_bf16 avx512vbmi amx_tile amx_bf16 amx_int8", "avx512", True),
        ("avx512f avx512_bf16 amx_tile amx_bf16 amx_int8", "avx512", False),
    ],
)
def test_kernels_are_those_that_run_whatever_the_processor_has(
    tmp_path: Path, flags: str, isa: str, is_refused: bool
) -> None:
    write(tmp_path, {"proc/cpuinfo": CPUINFO.format(flags)})
    seen = Machine.look(tmp_path, lambda: isa)
    assert (seen.isa, seen.is_refused_tiles) == (isa, is_refused)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no processor of Intel's")
def test_tiles_that_the_system_refuses_are_not_what_runs() -> None:
    filtered = Path(__file__).parents[2] / "support" / "without_tiles.py"
    told = subprocess.run(
        [sys.executable, str(filtered), sys.executable, "-m", "headrace", "doctor", "--port", "0"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    flags = set(machine.field(machine.read(Path("/proc/cpuinfo")), "flags").split())
    assert f"\n  kernels        {Machine.look().isa.removesuffix(' with amx')}\n" in told
    assert ("AMX" in told) == (flags >= machine.TILES)


def test_a_machine_that_says_nothing_is_seen_too(tmp_path: Path) -> None:
    def find() -> str:
        raise HeadraceError("headrace._core is missing")

    seen = Machine.look(tmp_path, find)
    assert (seen.isa, seen.gpus, seen.driver, seen.shm_bytes) == ("none", [], None, None)
    assert dict(doctor.facts(seen))["GPUs"] == "none"


def test_this_machine_is_seen() -> None:
    seen = Machine.look()
    assert seen.num_cores >= seen.num_usable > 0
    assert seen.memory_bytes >= seen.free_bytes > 0


def no_driver(num_gpus: int) -> Topology:
    raise HeadraceError("NVML: no such file")


@pytest.mark.parametrize(
    ("num_gpus", "flags", "find", "text"),
    [
        (1, {}, no_driver, None),
        (2, {}, lambda n: Topology.PCIE, "one-shot, in slices of 8 MiB: 2 GPUs, PCIe"),
        (4, {}, lambda n: Topology.PCIE, "NCCL: 4 GPUs without NVLink between all of them"),
        (2, {}, no_driver, "NCCL: NVML: no such file"),
        (
            2,
            {"disable_custom_all_reduce": True},
            lambda n: Topology.NVLINK,
            "NCCL: --disable-custom-all-reduce",
        ),
        (0, {"tp": 2}, no_driver, ON_CPU),
        (1, {"tp": 2}, no_driver, ON_CPU),
        (2, {"tp": 2, "device": "cpu"}, no_driver, ON_CPU),
        (2, {"device": "cpu"}, no_driver, None),
        (1, {"tp": 2, "device": "cuda"}, no_driver, None),  # which cannot be
    ],
)
def test_all_reduce_is_reported_with_its_reason(
    num_gpus: int,
    flags: dict[str, Any],
    find: Callable[[int], Topology],
    text: str | None,
) -> None:
    machine = replace(WELL, gpus=["NVIDIA H200"] * num_gpus)
    rows = list(doctor.all_reduce(ServerConfig(**flags), machine, find))
    assert rows == ([] if text is None else [("all-reduce", text)])


def test_links_are_those_of_the_gpus_that_workers_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(i, "NVIDIA H200", (9, 0), 132, GB, GB, "", f"uuid {5 - i}") for i in range(3)]
    monkeypatch.setattr(doctor, "find_gpus", lambda: gpus)
    monkeypatch.setattr(doctor, "load_nvml", lambda: "nvml")
    asked = {("nvml", ("uuid 5", "uuid 4")): Topology.PCIE}
    monkeypatch.setattr(doctor, "topology", lambda nvml, uuids: asked[nvml, tuple(uuids)])
    assert doctor.find_topology(2) is Topology.PCIE
    with pytest.raises(HeadraceError, match="3 of 4 GPUs may be used"):
        doctor.find_topology(4)


def test_gpus_are_reported_with_what_others_have_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus = [
        Gpu(i, "NVIDIA H200", (9, 0), 132, 140 * GB, free * GB, f"0000:{i}8:00.0", f"{i}")
        for i, free in enumerate((139, 60, 1))
    ]
    (finding,) = doctor.examine_gpus(ServerConfig(tp=2), lambda: gpus)
    assert (finding.text, finding.fatal) == (
        "GPU 1 has 60.0 GiB free, and --gpu-memory-utilization 0.9 would have 126.0 GiB: the KV "
        "cache will be smaller",
        False,
    )
    assert capsys.readouterr().out.splitlines()[1].split(None, 2) == [
        "GPU",
        "0",
        "NVIDIA H200, 139.0 GiB free of 140.0 GiB, compute capability 9.0, 132 processors, "
        "0000:08:00.0",
    ]


def test_gpus_that_cannot_be_asked_end_nothing() -> None:
    def fail() -> list[Gpu]:
        raise HeadraceError("cuda-python: No module named 'cuda'")

    (finding,) = doctor.examine_gpus(ServerConfig(), fail)
    assert "cannot be asked what they are: cuda-python: No module" in finding.text
    assert not finding.fatal


def wrong_with(groups: list[EngineGroup], machine: Machine) -> list[doctor.Finding]:
    sizes = []
    for config, card in ((group.config, group.card) for group in groups):
        on_gpus = doctor.is_for_gpus(config, card, machine)
        sizes.append(doctor.cpu_bytes(config, card, on_gpus))
    return list(doctor.wrong_with_models(groups, sizes, machine))


def test_a_machine_that_is_well_has_nothing_wrong() -> None:
    assert not list(doctor.wrong_with_machine(WELL))
    assert not wrong_with([EngineGroup(ServerConfig(), CARD)], WELL)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"isa": "portable"}, "no AVX2"),
        ({"is_refused_tiles": True}, "the processor's tiles (AMX)"),
        ({"num_usable": 2}, "5 processes share 2 cores"),
        ({"quota": 2.5}, "2.5 cores' time for 8 cores"),
        ({"num_numa_nodes": 2}, "--data-parallel-size auto, or stay on one: numactl"),
        ({"max_files": 256}, "may open 256 files"),
    ],
)
def test_what_is_wrong_with_a_machine_is_named(what: dict[str, object], text: str) -> None:
    (finding,) = doctor.wrong_with_machine(replace(WELL, **what))  # type: ignore[arg-type]
    assert text in finding.text
    assert not finding.fatal


def test_a_model_that_does_not_fit_cannot_be_served(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(31 * GB)  # of nothing
    card = replace(CARD, path=str(tmp_path), chat_template=None)
    group = EngineGroup(ServerConfig(), card)
    too_large, no_template = wrong_with([group], WELL)
    assert too_large.fatal
    assert "weights and KV cache take 33.0 GiB, and 32.0 GiB are free" in too_large.text
    assert "/v1/chat/completions will refuse" in no_template.text
    with_gpu = replace(WELL, gpus=["NVIDIA H200"])  # which says itself what it has room for
    assert not [f for f in wrong_with([group], with_gpu) if f.fatal]
    smaller = EngineGroup(ServerConfig(kv_cache_memory_bytes=GB), card)
    assert not [f for f in wrong_with([smaller], WELL) if f.fatal]
    mock = EngineGroup(ServerConfig(engine="mock"), card)
    assert not wrong_with([mock], WELL)


def test_models_that_fit_alone_may_not_fit_together(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(15 * GB)  # of nothing
    first = EngineGroup(ServerConfig(), replace(CARD, path=str(tmp_path), name="a"))
    second = EngineGroup(ServerConfig(), replace(first.card, name="b", chat_template=None))
    (no_template,) = wrong_with([second], WELL)
    assert no_template.text.startswith("the model has no chat template")
    too_large, no_template = wrong_with([first, second], WELL)
    assert "weights and KV cache take 34.0 GiB" in too_large.text
    assert no_template.text.startswith("b has no chat template")
    twice = EngineGroup(ServerConfig(data_parallel_size=2), first.card)
    (too_large,) = wrong_with([twice], WELL)
    assert "weights and KV cache take 34.0 GiB" in too_large.text
    same, _ = wrong_with([first, first], WELL)
    assert (same.fatal, "two models are called a" in same.text) == (True, True)


def test_a_reranker_that_generates_is_told_of_the_flag() -> None:
    card = replace(CARD, path="/Qwen3-Reranker-0.6B")
    (finding,) = wrong_with([EngineGroup(ServerConfig(), card)], WELL)
    assert "--hf-overrides with classifier_from_token" in finding.text
    ranks = replace(card, pooling=Pooling(PoolingKind.LAST, scores=True))
    assert not wrong_with([EngineGroup(ServerConfig(), ranks)], WELL)


def test_adapters_count_in_the_memory_that_a_model_takes() -> None:
    demo = read_card(ServerConfig())
    plain = ServerConfig(device="cpu", kv_cache_memory_bytes=GB)
    adapted = replace(plain, enable_lora=True, max_loras=1000)
    assert dict(doctor.kept_beside(plain, demo, *doctor.beside_bytes(plain, demo))) == {}
    (row,) = doctor.kept_beside(adapted, demo, *doctor.beside_bytes(adapted, demo))
    assert row[0] == "adapters" and row[1].startswith("at most 1000, of rank 64: ")
    machine = replace(WELL, free_bytes=8 * GB)
    without, loaded = EngineGroup(plain, demo), EngineGroup(adapted, demo)
    assert not [f for f in wrong_with([without], machine) if f.fatal]
    (finding,) = [f for f in wrong_with([loaded], machine) if f.fatal]
    assert "lower --max-cpu-loras" in finding.text


def test_the_doctor_says_what_will_run_a_model_and_why(tmp_path: Path) -> None:
    demo = read_card(ServerConfig())
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    card = replace(CARD, path=str(tmp_path))
    on_cpu = ServerConfig(device="cpu")
    told = "the C++ core: it runs llama models; --device says so"
    assert doctor.executor_of(on_cpu, demo) == told
    assert "runs no model" in doctor.executor_of(ServerConfig(engine="mock"), demo)
    theirs = ServerConfig(device="cpu", model_impl="transformers")
    for config, model_type, why in [
        (on_cpu, "mamba", "model_type 'mamba' is not supported by Headrace's own modules"),
        (theirs, "llama", "--model-impl says so"),
    ]:
        write(tmp_path, {"config.json": json.dumps(llama | {"model_type": model_type})})
        told = f"transformers: {why}; on the CPU: --device says so"
        assert doctor.executor_of(config, card) == told
    write(tmp_path, {"config.json": json.dumps(llama | {"model_type": "mamba"})})
    for config, text in [
        (ServerConfig(quantization="int8"), "which cannot do --quantization int8"),
        (ServerConfig(model_impl="headrace"), "'mamba' is not supported"),
    ]:
        (finding,) = doctor.examine_model(config, card)
        assert text in finding.text
        assert finding.fatal
    (finding,) = doctor.examine_model(theirs, demo)
    assert "only folders" in finding.text


def test_the_doctor_tells_weights_by_type(capsys: pytest.CaptureFixture[str]) -> None:
    config = ServerConfig(device="cpu")
    demo = read_card(config)
    assert not doctor.examine_model(config, demo)
    told = capsys.readouterr().out
    assert "Q4_1           210 tensors of 63.3 MiB, executed as stored: 63.3 MiB of mem" in told
    assert "Q8_0           1 tensor of 28.7 MiB, executed as stored, as int8: 28.7 MiB" in told
    assert "all            92.1 MiB of memory, beside the KV cache" in told
    assert doctor.weight_memory(config, demo) < doctor.weight_bytes(Path(demo.path))
    as_stored = doctor.weight_memory(replace(config, engine="mock"), demo)
    assert as_stored == doctor.weight_bytes(Path(demo.path))


def test_the_doctor_tells_what_a_projector_file_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mmproj = write_gguf(
        tmp_path / "mmproj.gguf",
        "clip",
        {"clip.projector_type": "gemma3"},
        {"v.patch_embd.bias": np.zeros(1 << 18, np.float32)},
    )
    config, demo = ServerConfig(device="cpu"), read_card(ServerConfig())
    with_images = replace(demo, mmproj=str(mmproj))
    doctor.examine_model(config, with_images)
    assert "mmproj.gguf, gemma3, 1.0 MiB\n" in capsys.readouterr().out
    with_rows, as_stored = replace(with_images, image_row_size=64), replace(config, engine="mock")
    without = doctor.weight_memory(as_stored, demo)
    assert doctor.weight_memory(as_stored, with_rows) - without == 1 << 20


def test_the_doctor_tells_that_a_model_takes_images() -> None:
    config, demo = ServerConfig(device="cpu"), read_card(ServerConfig())
    card = replace(demo, image_token=7)
    rows = dict(doctor.plan(config, card, "core", "the C++ core", on_gpus=False))
    assert rows["images"] == "taken; the tower runs in the C++ core"
    assert "images" not in dict(doctor.plan(config, demo, "core", "nothing", on_gpus=False))


def test_the_doctor_tells_of_engines_on_other_machines() -> None:
    config = ServerConfig(
        data_parallel_size=3,
        data_parallel_backend="ray",
        remote_engines=("tcp://a:1",),
        engine_key_file="key",
    )
    rows = dict(doctor.plan(config, read_card(ServerConfig()), "core", "nothing", on_gpus=False))
    assert rows["elsewhere"] == (
        "tcp://a:1, 3 engines by Ray; the server looks for them when it starts; on CPUs, "
        "texts are equal where all machines have the same kernels"
    )
    assert "elsewhere" not in dict(
        doctor.plan(ServerConfig(), read_card(ServerConfig()), "core", "nothing", on_gpus=False)
    )


def test_the_doctor_tells_which_layers_a_stage_has(tmp_path: Path) -> None:
    config, demo = ServerConfig(device="cpu", pp=2, tp=3), read_card(ServerConfig())
    rows = dict(doctor.plan(config, demo, "core", "nothing", on_gpus=False))
    assert rows["stages"] == "2 of layers 0 to 18, 19 to 29, each with 3 workers"
    assert "stages" not in dict(doctor.plan(config, demo, doctor.NOTHING, "", on_gpus=False))
    own, more = dict(doctor.kept_beside(config, demo, 0, 0, 1 << 20)), demo.tied_bytes
    assert own == {"embedding": "in the first stage and the last: 1.0 MiB more of memory"}
    alone = doctor.weight_memory(replace(config, pp=1), demo)
    assert doctor.weight_memory(config, demo) == pytest.approx(alone + more, rel=0.01)
    takes_images = replace(demo, image_token=7, image_row_size=9)
    (finding,) = doctor.examine_model(config, takes_images)
    assert finding.text == "--pp 2: this model takes images; give --max-images 0"


def test_the_doctor_says_what_runs_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = read_card(ServerConfig())
    config = ServerConfig(device="cuda", gpu_memory_utilization=0.8)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    told = doctor.executor_of(config, demo)
    assert told == "kernels on GPUs: it runs llama models; --device says so"
    assert (
        "what --gpu-memory-utilization 0.8 leaves"
        in dict(doctor.plan(config, demo, told, "nothing", on_gpus=True)).values()
    )
    (finding,) = doctor.examine_model(replace(config, kv_cache_dtype="float32"), demo)
    assert "--kv-cache-dtype float32 is not that of the weights" in finding.text
    assert finding.fatal


@pytest.mark.parametrize(
    ("dtype", "multiplied"), [("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_the_doctor_says_what_an_encoder_multiplies(dtype: str, multiplied: str) -> None:
    config = ServerConfig(device="cpu", dtype=dtype, model=str(minilm()))
    assert doctor.executor_of(config, read_card(config)).endswith(f"; multiplies {multiplied}")


def test_an_encoder_that_is_not_lowered_runs_in_transformers(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": json.dumps({"model_type": "bert", "is_decoder": True})})
    card = replace(CARD, path=str(tmp_path))
    told = doctor.executor_of(ServerConfig(device="cpu"), card)
    lacks = "transformers: the config of a bert model lacks 'max_position_embeddings'"
    assert told == f"{lacks}; on the CPU: --device says so"


def test_the_doctor_says_that_modules_run_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    write(tmp_path, {"config.json": json.dumps({"model_type": "bert", "is_decoder": True})})
    card = replace(CARD, path=str(tmp_path))
    told = doctor.executor_of(ServerConfig(device="cuda"), card)
    assert told.endswith("; on GPUs: --device says so")
    with pytest.raises(ModelError, match="modules run on one GPU, not on --tp 2"):
        doctor.executor_of(ServerConfig(device="cuda", tp=2), card)
    config = ServerConfig(device="cuda", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 .* have none of these"):
        doctor.executor_of(config, card)


def test_a_package_that_is_missing_is_named() -> None:
    (finding,) = doctor.wrong_with_install({"there": "1.0", "gone": None})
    assert (finding.text, finding.fatal) == (
        "the package gone is missing; `pip install gone`",
        True,
    )
    found = packages()
    assert found["msgspec"]
    assert "cuda-python" not in found


def test_doctor_exits_with_1_when_nothing_can_be_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    doctor.main(["--port", "0"])
    told = capsys.readouterr().out
    assert "machine:\n  processor " in told
    assert "model:\n  name           SmolLM2-135M-Instruct\n" in told
    assert "\n  runs in        the C++ core: it runs llama models; " in told
    demo = find_demo_model()
    with pytest.raises(SystemExit) as ended:
        doctor.main(["/no/such/model", str(demo), "--host", "192.0.2.1"])
    assert ended.value.code == 1
    told = capsys.readouterr().out
    assert "model:\n  name           SmolLM2-135M-Instruct\n" in told
    assert "  ! /no/such/model: no such file or folder\n" in told
    assert "  ! cannot listen on --host 192.0.2.1 --port 8000: " in told
