"""Adapters on a server: every text is that of merged weights, whatever else goes on."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import psutil
import pytest
import torch
from peft_folders import greedy, write_adapter
from servers import HELD, RunningServer, wait_until
from tiny_models import make_folder
from transformers import AutoModelForCausalLM

from headrace import ApiError, Client, Engine, LoRARequest, SamplingParams

TIMEOUT_S = 300
NUM_TOKENS = 32
LENGTHS = (3, 40, 70, 100) if "LORA_SOAK_S" in os.environ else (40, 100)  # of prompts
TRAINED = os.environ.get("TRAINED_ADAPTERS")  # a folder
SOAK_S = float(os.environ.get("LORA_SOAK_S", "1"))
FLOOD, FEW = 60, 3  # requests; 12 run at a time
MAX_GROWTH = 32 << 20  # of a worker: of 200 adapters it holds 5
EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")
FLAGS = (*EXACT, "--enable-lora", "--max-num-batched-tokens", "48", "--max-num-seqs", "12")
KINDS: tuple[dict[str, Any], ...] = (  # of adapters
    {},
    {"rank": 3, "targets": ("q_proj", "v_proj")},
    {"use_rslora": True, "rank": 16},
    {"use_dora": True},
    {"alpha_pattern": {"down_proj": 40}, "rank_pattern": {"o_proj": 5}},
    {"targets": ("lm_head", "down_proj"), "std": 0.05},
    {"rank": 32},
    {"rank": 1, "targets": ("k_proj", "up_proj"), "std": 0.5},
)
NAMES = tuple(f"adapter-{i}" for i in range(len(KINDS)))


class Case(NamedTuple):
    """A prompt, the adapter it is for ("" is none), and the continuation."""

    adapter: str
    prompt: list[int]
    expected: list[int]


class Folders(NamedTuple):
    """A model, its adapters, and what each makes of the prompts."""

    model: Path
    adapters: Path
    cases: list[Case]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("adapters")
    make_folder(root / "model", "llama", initializer_range=0.2)
    base = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    models = {"": base}
    for seed, (name, kind) in enumerate(zip(NAMES, KINDS, strict=True)):
        models[name] = write_adapter(root / "all" / name, base, seed, **kind)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 40_000, length).tolist() for length in LENGTHS]
    cases = [
        Case(name, prompt, greedy(model, prompt, NUM_TOKENS))
        for name, model in models.items()
        for prompt in prompts
    ]
    texts = {tuple(case.expected) for case in cases}
    assert len(texts) > len(cases) * 3 // 4, "adapters change texts"
    return Folders(root / "model", root / "all", cases)


@pytest.fixture(scope="module")
def server(folders: Folders) -> Iterator[RunningServer]:
    running = RunningServer(
        str(folders.model),
        *(*FLAGS, "--lora-dir", str(folders.adapters), "--served-model-name", "base"),
        *("--max-loras", "3", "--max-cpu-loras", "5", "--allow-runtime-lora-updating"),
        *("--admin-api-key", "admin", *HELD),
    )
    yield running
    assert running.stop() == 0


def complete(server: RunningServer, case: Case) -> list[int]:
    body = {
        "prompt": case.prompt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    body |= {"model": case.adapter} if case.adapter else {}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == case.adapter or not case.adapter
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def check_all(server: RunningServer, cases: list[Case]) -> None:
    """Send all at once; each is its reference's."""
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: complete(server, case), cases))
    wrong = [case.adapter for case, ids in zip(cases, answers, strict=True) if ids != case.expected]
    assert not wrong


def load(server: RunningServer, name: str, path: Path | str, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=TIMEOUT_S)


def test_adapters_alone_mixed_and_cached_are_merged_weights(
    server: RunningServer, folders: Folders
) -> None:
    for case in folders.cases[1::5]:
        assert complete(server, case) == case.expected, case.adapter
    check_all(server, folders.cases)
    check_all(server, folders.cases)  # now with cached prefixes, and adapters that had left
    assert server.metric("prefix_cache_hits_total") > 0


def test_prompt_of_an_adapter_is_computed_ahead(server: RunningServer, folders: Folders) -> None:
    prompt = " ".join(["alpha"] * 100)
    with Client(server.url, "admin") as client:
        warmed = client.warm(prompt, model=NAMES[0])
        assert warmed.completion_tokens == 0 and warmed.prompt_tokens >= 100
        for model, is_known in ((NAMES[1], False), ("base", False), (NAMES[0], True)):
            used = client.complete(prompt, model=model, max_tokens=1).usage
            assert used is not None and used.prompt_tokens_details is not None
            assert (used.prompt_tokens_details.cached_tokens > 0) is is_known, model


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_adapters_outlive_a_death(server: RunningServer, folders: Folders, victim: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        before = server.metric("generation_tokens_total")
        checking = pool.submit(check_all, server, folders.cases)
        wait_until(
            lambda: server.metric("generation_tokens_total") > before + 100 or checking.done(),
            "texts have begun",
        )
        title = "headrace: worker 0" if victim == "worker" else "headrace: engine"
        os.kill(server.ring[title].pid, signal.SIGKILL)
        checking.result()


def test_adapters_load_and_unload_while_others_run(server: RunningServer, folders: Folders) -> None:
    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(check_all, server, folders.cases)
        for round in range(3):
            response = load(server, f"extra-{round}", folders.adapters / NAMES[round])
            assert response.status_code == 200, response.text
            case = folders.cases[len(LENGTHS) * (round + 1)]
            extra = case._replace(adapter=f"extra-{round}")
            assert complete(server, extra) == case.expected
            unload = httpx.post(
                f"{server.url}/unload_lora_adapter", json={"lora_name": f"extra-{round}"}
            )
            assert unload.json()["success"]
        checking.result()
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["base"]


def test_loaded_adapter_is_listed_with_its_parent(server: RunningServer, folders: Folders) -> None:
    path = folders.adapters / NAMES[0]
    assert load(server, "org/one", path).status_code == 200
    try:
        listed = httpx.get(f"{server.url}/v1/models").json()["data"][1]
        assert (listed["id"], listed["root"], listed["parent"]) == ("org/one", str(path), "base")
        assert load(server, "org/one", path).status_code == 200  # it is the same
        other = load(server, "org/one", folders.adapters / NAMES[1])
        assert (other.status_code, "loaded already" in other.text) == (400, True)
    finally:
        body = {"lora_name": "org/one"}
        assert httpx.post(f"{server.url}/v1/unload_lora_adapter", json=body).status_code == 200
        assert httpx.post(f"{server.url}/v1/unload_lora_adapter", json=body).status_code == 404


def test_tensor_parallel_and_preempted_are_merged_weights(folders: Folders) -> None:
    modules = [f"{name}={folders.adapters / name}" for name in NAMES]
    pages = 12 * 2 * 4 * 2 * 2 * 16 * 32  # 12 pages of 32 tokens in fp32
    server = RunningServer(
        str(folders.model),
        *(*FLAGS, "--lora-modules", *modules, "--tp", "2", "--kv-cache-memory-bytes", str(pages)),
        *("--max-model-len", "160", "--no-enable-prefix-caching", "--speculative", "self"),
        *HELD,
    )
    try:
        with ThreadPoolExecutor(1) as pool, held(server.ring["headrace: engine"]):
            checking = pool.submit(check_all, server, folders.cases)
            await_open(server, len(folders.cases))
        checking.result()
        assert server.metric("num_preemptions_total") > 0
        assert server.metric("spec_decode_num_draft_tokens_total") > 0
        refused = load(server, "more", folders.adapters / NAMES[0])
        assert refused.status_code == 403
        assert server.stop() == 0
    finally:
        server.close()


def test_transformers_modules_with_adapters_are_merged_weights(folders: Folders) -> None:
    server = RunningServer(
        str(folders.model),
        *(*FLAGS, "--model-impl", "transformers", "--lora-dir", str(folders.adapters)),
        *("--max-loras", "3", "--max-cpu-loras", "5"),
    )
    try:
        check_all(server, folders.cases[:: len(LENGTHS)])
        assert server.stop() == 0
    finally:
        server.close()


def test_engine_takes_a_lora_request(folders: Folders) -> None:
    flags = {"dtype": "float32", "kv_cache_dtype": "float32", "enable_lora": True}
    by_adapter = {case.adapter: case for case in folders.cases}
    with Engine(folders.model, device="cpu", **flags) as engine:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
        for name in ("", NAMES[1]):
            case = by_adapter[name]
            lora_request = LoRARequest(name, 1, folders.adapters / name) if name else None
            options = {"ignore_eos": True, "return_token_ids": True}
            (output,) = engine.generate(
                [case.prompt], params, lora_request=lora_request, use_tqdm=False, **options
            )
            assert output.outputs[0].token_ids == case.expected
        with pytest.raises(ApiError, match="is no adapter"):
            engine.generate("x", lora_request=LoRARequest("missing", 2, "/nowhere"))


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"lora_name": "x", "lora_path": "/nowhere"}, 400, "is no adapter"),
        ({"lora_name": "x", "lora_path": "../../etc"}, 400, "must not have '..'"),
        ({"lora_name": "", "lora_path": "a"}, 400, "1 to 80 characters"),
        ({"lora_name": "base", "lora_path": "a"}, 400, "is the name of the model"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": 5, "lora_path": []}, 400, "lora_name"),
    ],
)
def test_load_of_nothing_is_refused(
    server: RunningServer, body: dict[str, Any], status: int, text: str
) -> None:
    response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body)
    assert (response.status_code, text in response.text) == (status, True), response.text


def test_adapter_that_does_not_fit_is_refused(
    server: RunningServer, folders: Folders, tmp_path: Path
) -> None:
    other = make_folder(tmp_path / "other", "llama", num_key_value_heads=1)
    write_adapter(tmp_path / "narrow", other, 0)
    response = load(server, "narrow", tmp_path / "narrow")
    assert response.status_code == 400
    assert "] in the adapter, and [" in response.json()["error"]["message"]
    write_adapter(folders.adapters / "narrow", other, 0)  # found by its name
    body = {"model": "narrow", "prompt": "x"}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert (
        httpx.post(f"{server.url}/v1/completions", json=body | {"model": "no"}).status_code == 404
    )
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "base"
    case = folders.cases[3]
    assert complete(server, case) == case.expected


def test_generate_names_adapters_by_lora_path(server: RunningServer, folders: Folders) -> None:
    cases = folders.cases[:: len(LENGTHS)][:3]
    body = {
        "input_ids": [case.prompt for case in cases],
        "lora_path": [case.adapter or None for case in cases],
        "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
    }
    answers = httpx.post(f"{server.url}/generate", json=body, timeout=TIMEOUT_S).json()
    assert [answer["output_ids"] for answer in answers] == [case.expected for case in cases]
    body["lora_path"] = "missing"
    refused = httpx.post(f"{server.url}/generate", json=body, timeout=TIMEOUT_S)
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "lora_path")


def test_few_of_an_adapter_pass_a_flood_of_another(server: RunningServer, folders: Folders) -> None:
    flooding, other = folders.cases[len(LENGTHS)], folders.cases[2 * len(LENGTHS)]
    ended: list[str] = []

    def run(case: Case) -> None:
        assert complete(server, case) == case.expected
        ended.append(case.adapter)

    with ThreadPoolExecutor(FLOOD + FEW) as pool, held(server.ring["headrace: engine"]):
        sent = [pool.submit(run, flooding) for _ in range(FLOOD)]
        await_open(server, FLOOD)
        sent += [pool.submit(run, other) for _ in range(FEW)]
        await_open(server, FLOOD + FEW)
    for one in sent:
        one.result()
    assert set(ended[-FLOOD // 3 :]) == {flooding.adapter}


@contextmanager
def held(process: psutil.Process) -> Iterator[None]:
    """Let a process of a server that is `HELD` do nothing meanwhile."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def await_open(server: RunningServer, count: int) -> None:
    """Wait until the server has so many requests beside the one for its metrics."""
    wait_until(lambda: server.metric("http_requests_open") == count + 1, f"{count} requests came")


def test_metrics_name_the_adapters_in_use(server: RunningServer, folders: Folders) -> None:
    assert complete(server, folders.cases[-1]) == folders.cases[-1].expected
    text = server.metrics()
    assert 'vllm:lora_requests_info{max_lora="3"' in text


def test_thousand_adapters_take_the_memory_of_few(server: RunningServer, folders: Folders) -> None:
    for i in range(1000):
        (folders.adapters / f"copy-{i}").symlink_to(NAMES[i % len(NAMES)])
    rng = np.random.default_rng(0)
    worker = server.ring["headrace: worker 0"]
    deadline, resident = time.monotonic() + SOAK_S, 0
    while True:
        chosen = rng.choice(200, 24, replace=False)
        cases = [folders.cases[len(LENGTHS) * (1 + i % len(NAMES))] for i in chosen]
        check_all(
            server, [c._replace(adapter=f"copy-{i}") for c, i in zip(cases, chosen, strict=True)]
        )
        resident = resident or worker.memory_info().rss
        if time.monotonic() > deadline:
            break
    assert worker.memory_info().rss - resident < MAX_GROWTH


def trained_cases(folder: Path) -> list[Case]:
    """Return what PEFT makes of the prompts with each adapter of a folder."""
    made = [
        (path.parent.name, msgspec.json.decode(path.read_bytes()))
        for path in sorted(folder.glob("*/expected.json"))
    ]
    return [
        Case(name, prompt, ids)
        for name, own in made
        for prompt, ids in zip(own["prompts"], own["expected"], strict=True)
    ]


@pytest.mark.skipif(TRAINED is None, reason="tests/support/peft_training.py makes them")
@pytest.mark.parametrize("tp", [1, 2])
def test_trained_adapters_are_as_peft_has_them(tp: int) -> None:
    assert TRAINED is not None
    cases = trained_cases(Path(TRAINED))
    model = Path(os.environ["TRAINED_MODEL"])
    config = msgspec.json.decode((model / "config.json").read_bytes())
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    keys = config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    pages = 14 * 32 * 2 * keys * 4  # 14 pages of 32 tokens in fp32
    server = RunningServer(
        str(model),
        *(*FLAGS, "--lora-dir", TRAINED, "--tp", str(tp), "--allow-runtime-lora-updating"),
        *("--max-loras", "3", "--max-cpu-loras", "5", "--max-model-len", "160"),
        *("--kv-cache-memory-bytes", str(pages)),
    )
    try:
        for case in cases[::4]:
            assert complete(server, case) == case.expected, case.adapter
        check_all(server, cases)
        assert server.metric("num_preemptions_total") > 0
        with ThreadPoolExecutor(1) as pool:
            checking = pool.submit(check_all, server, cases)
            assert load(server, "extra", Path(TRAINED) / cases[0].adapter).status_code == 200
            body = {"lora_name": "extra"}
            httpx.post(f"{server.url}/v1/unload_lora_adapter", json=body).raise_for_status()
            os.kill(server.ring["headrace: worker 0"].pid, signal.SIGKILL)
            checking.result()
            checking = pool.submit(check_all, server, cases)
            os.kill(server.ring["headrace: engine"].pid, signal.SIGKILL)
            checking.result()
        assert server.stop() == 0
    finally:
        server.close()
