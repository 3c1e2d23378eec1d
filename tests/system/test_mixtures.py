"""Mixtures and hybrids served by two workers: texts outlive one of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import family_table
import httpx
import msgspec
import pytest
import transformers
from hybrid_models import tiny_hybrid
from reference import endless_answers
from servers import RunningServer, wait_until
from tiny_models import make_folder, save_in_bf16

TIMEOUT_S = 300
PROMPTS = [[504, 3575, 282, 4649, 314], [504, 3575, 282, 4649, 314, 260, 1038, 18, 905], [19, 20]]
PAGES = [19, 20, *range(300, 338)]  # a prompt of more than one
NUM_TOKENS = 24
VOCABULARY = 49152  # of the demo model
FLAGS = (
    *("--dtype", "float32", "--kv-cache-dtype", "float32", "--tp", "2"),
    *("--max-num-batched-tokens", "6", "--max-num-seqs", "4"),
)
FIELDS: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": {"head_dim": 24, "num_experts": 6, "moe_topk": 3},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 48,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 6,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
}
# Hybrids of other tests, most of them without experts: `make families` serves them.
TINY_HYBRIDS = ["lfm2", "qwen3_5_text", "falcon_h1", "nemotron_h", "bamba", "jamba", "kimi_linear"]
HYBRIDS = {"lfm2_moe", "qwen3_next", "granitemoehybrid", *TINY_HYBRIDS}
HAS_PAGES = {*HYBRIDS, "deepseek_v3"}  # prompts of more than one
FEW = ("hunyuan_v1_moe", "qwen3_next", "deepseek_v3")  # `make families` has all


def texts_of(model: Any, folder: Path, prompts: list[list[int]]) -> list[str]:
    """Return what transformers says."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    new = endless_answers(model, prompts, NUM_TOKENS)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in new]


def read(server: RunningServer, prompt: list[int], kills: bool) -> str:
    """Return the text of a stream; `kills` a worker once it has begun to come."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    body |= {"temperature": 0}
    text, num_events = "", 0
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += msgspec.json.decode(line[6:])["choices"][0]["text"]
            num_events += 1
            if kills and num_events == 1:
                server.ring["headrace: worker 1"].kill()
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tiny-mixture"


@pytest.mark.parametrize("family", [*FIELDS, *TINY_HYBRIDS] if family_table.WRITES else FEW)
def test_a_worker_s_death_changes_no_text(family: str, folder: Path) -> None:
    if family in FIELDS:
        model = make_folder(folder, family, initializer_range=0.2, **FIELDS[family])
    else:
        model = save_in_bf16(tiny_hybrid(family, vocab_size=VOCABULARY), folder)
    prompts = [*PROMPTS, PAGES] if family in HAS_PAGES else PROMPTS
    expected = texts_of(model, folder, prompts)
    server = RunningServer(str(folder), *FLAGS)
    try:
        for kills in (False, True):
            with ThreadPoolExecutor(len(prompts)) as pool:
                streams = [
                    pool.submit(read, server, prompt, kills and i == 0)
                    for i, prompt in enumerate(prompts)
                ]
                assert [stream.result() for stream in streams] == expected
        wait_until(lambda: server.metric("process_restarts_total") >= 1, "a new worker")
        if family in HYBRIDS:
            server.await_free("state_slots")
        assert server.stop() == 0
    finally:
        server.close()
    assert "worker 1" in server.log and "killed" in server.log.lower()
