"""`--device cuda`: kernels, in Triton's interpreter, say what the CPU's own code says."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import family_table
import httpx
import pytest
from mutants.mutants import interpreted
from servers import RunningServer
from tiny_models import make_byte_folder

from headrace.system.machine import has_gpus

TIMEOUT_S = 300
EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")
SMALL = ("--max-model-len", "128", "--kv-cache-memory-bytes", "4000000")
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": {  # with experts
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}
GEMMA_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "sliding_window": 20,
    "vocab_size_per_layer_input": 200,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
}
GEMMAS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"global_head_dim": 32},
    "gemma3n_text": {
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
}
HYBRID_PROMPTS = ["A prompt that is longer than one page of tokens", "Hello", "x"]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}),
    (COMPLETE, {"prompt": "A prompt of its own", "max_tokens": 5, "temperature": 0}),
    (COMPLETE, {"prompt": "Hello", "max_tokens": 5, "temperature": 1, "seed": 3, "top_p": 0.8}),
    (
        COMPLETE,
        {
            "prompt": "x",
            "max_tokens": 4,
            "seed": 4,
            "structured_outputs": {"choice": ["on", "off"]},
        },
    ),
    (COMPLETE, {"prompt": "y", "max_tokens": 4, "seed": 5, "logit_bias": {"66": 50}}),
    (
        COMPLETE,
        {"prompt": "z", "max_tokens": 3, "seed": 6, "frequency_penalty": 1.5, "logprobs": 2},
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_byte_folder(folder)
    return folder


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> Iterator[RunningServer]:
    running = RunningServer(str(folder), "--device", "cpu", *EXACT, *SMALL)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def on_kernels(folder: Path) -> Iterator[RunningServer]:
    flags = ("--device", "cuda", "--tp", "2", *EXACT, *SMALL)
    running = RunningServer(str(folder), *flags, env=interpreted())
    yield running
    assert running.stop() == 0


SETTINGS: dict[str, tuple[str, ...]] = {
    "graphs, one step ahead": (),
    "no graphs": ("--enforce-eager",),
    "one step at a time": ("--no-async-scheduling",),
    "few mates": ("--max-num-seqs", "2"),
    "prompts in pieces": ("--max-num-seqs", "6", "--max-num-batched-tokens", "9"),
}


def ask(server: RunningServer) -> list[Any]:
    """Return the choices of all answers, asked at once."""

    def post(request: tuple[str, dict[str, Any]]) -> Any:
        path, body = request
        response = httpx.post(f"{server.url}{path}", json=body, timeout=TIMEOUT_S)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(post, REQUESTS))


def test_texts_are_those_of_the_cpu(on_kernels: RunningServer, on_cpu: RunningServer) -> None:
    assert "runs on GPUs: --device says so" in on_kernels.log
    ours, theirs = ask(on_kernels), ask(on_cpu)
    tops = [choices[-1].pop("logprobs")["token_logprobs"] for choices in (ours, theirs)]
    assert ours == theirs
    assert on_kernels.metric("engine_steps_ahead_total") > 0
    assert ours[3]["text"] in ("on", "off")
    assert tops[0] == pytest.approx(tops[1], abs=1e-4)


@pytest.mark.parametrize("setting", SETTINGS)
def test_gpu_texts_equal_cpu_texts_however_steps_run(
    setting: str, folder: Path, on_cpu: RunningServer
) -> None:
    if not has_gpus():
        pytest.skip("there is no GPU")
    flags = ("--device", "cuda", *SETTINGS[setting])
    on_gpu = RunningServer(str(folder), *flags, *EXACT, *SMALL)
    try:
        ours, theirs = ask(on_gpu), ask(on_cpu)
    finally:
        on_gpu.close()
    tops = [choices[-1].pop("logprobs")["token_logprobs"] for choices in (ours, theirs)]
    assert ours == theirs
    assert tops[0] == pytest.approx(tops[1], abs=1e-4)


@pytest.mark.parametrize(("model_type", "tp"), [("lfm2", 1), ("qwen3_next", 2)])
def test_texts_of_a_hybrid_are_those_of_the_cpu(model_type: str, tp: int, tmp_path: Path) -> None:
    """Steps go ahead of each other, prompts come in pieces and are known the second time."""
    if not family_table.WRITES:
        pytest.skip("`make families` serves it")
    make_byte_folder(tmp_path, model_type, num_hidden_layers=2, **HYBRIDS[model_type])
    flags = (*EXACT, *SMALL, "--max-num-batched-tokens", "20", "--max-num-seqs", "3")
    on_kernels = ("--device", "cuda", "--tp", str(tp))
    servers = [
        RunningServer(str(tmp_path), *on_kernels, *flags, env=interpreted()),
        RunningServer(str(tmp_path), "--device", "cpu", *flags),
    ]
    texts, num_ahead = [], []
    try:
        for server in servers:
            for prompts in (HYBRID_PROMPTS, HYBRID_PROMPTS[:1]):
                with ThreadPoolExecutor(len(prompts)) as pool:
                    texts.append(list(pool.map(partial(complete, server), prompts)))
            server.await_free("state_slots")
            assert server.metric("prefix_cache_hits_total") > 0
            num_ahead.append(server.metric("engine_steps_ahead_total"))
            assert server.stop() == 0
    finally:
        for server in servers:
            server.close()
    assert num_ahead[0] > 0
    assert texts[:2] == texts[2:]
    assert "runs on GPUs: --device says so" in servers[0].log


@pytest.mark.parametrize(("case", "tp"), [("gemma4_text", 2), ("gemma3n_text", 1)])
def test_texts_of_a_newer_gemma_are_those_of_the_cpu(case: str, tp: int, tmp_path: Path) -> None:
    """Prompts come in pieces and are known the second time; layers read the keys of others."""
    if not family_table.WRITES:
        pytest.skip("`make families` serves it")
    make_byte_folder(tmp_path, case, **GEMMA_FIELDS | GEMMAS[case])
    flags = (*EXACT, *SMALL, "--max-num-batched-tokens", "20", "--max-num-seqs", "3")
    servers = [
        RunningServer(
            str(tmp_path), "--device", "cuda", "--tp", str(tp), *flags, env=interpreted()
        ),
        RunningServer(str(tmp_path), "--device", "cpu", *flags),
    ]
    texts = []
    try:
        for server in servers:
            for prompts in (HYBRID_PROMPTS, HYBRID_PROMPTS[:1]):
                with ThreadPoolExecutor(len(prompts)) as pool:
                    texts.append(list(pool.map(partial(complete, server), prompts)))
            assert server.metric("prefix_cache_hits_total") > 0
            assert server.stop() == 0
    finally:
        for server in servers:
            server.close()
    assert texts[:2] == texts[2:]
    assert "runs on GPUs: --device says so" in servers[0].log


def complete(server: RunningServer, prompt: str) -> str:
    """Return the greedy text of a prompt."""
    body = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    response = httpx.post(f"{server.url}{COMPLETE}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text
