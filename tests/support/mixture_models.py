"""Tiny random mixtures of experts of transformers, and steps that run them."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_models import random_model

from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch, Executor, Floats
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.reference.torch_executor import TorchExecutor

PROMPT = [17, 3, 94, 55, 8, 61, 42, 7, 23, 88, 31, 12, 77, 50, 2, 9, 63, 64, 11, 90]
STRANGER = [44, 44, 71, 13]  # beside the prompt in a batch
EXECUTORS = {
    "torch": partial(TorchExecutor, num_pages=8, page_tokens=16),
    "core": partial(CpuExecutor, num_pages=8, page_tokens=16, threads=1),
}
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
GRANITE = {
    "num_local_experts": 5,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32}
HUNYUAN = {"num_experts": 6, "moe_topk": 3, "head_dim": 24}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0}
LONGROPE = {  # PROMPT is within the trained length
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [4.0] * 8,
    "short_mscale": 1.25,
    "long_mscale": 1.5,
    "original_max_position_embeddings": 32,
}
SLIDING_FIRST = ["sliding_attention", "full_attention", "full_attention"]

LLAMA4 = {  # PROMPT has several chunks, and queries of several temperatures
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "head_dim": 24,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 6,
    "floor_scale": 4,
    "attn_scale": 0.5,
}
SCOUT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}

MIXTURES: dict[str, dict[str, Any]] = {
    "llama4_text": LLAMA4,
    "llama4_text with Scout's rope and two experts": LLAMA4
    | {"num_experts_per_tok": 2, "rope_parameters": SCOUT_ROPE},
    "llama4_text of Maverick's kind": LLAMA4
    | {"interleave_moe_layer_step": 2, "num_local_experts": 128, "intermediate_size": 16}
    | {"use_qk_norm": False},
    "mixtral": {"num_local_experts": 5, "head_dim": 24},
    "mixtral with a window": {"sliding_window": 5, "num_experts_per_tok": 1},
    "qwen2_moe": QWEN | {"shared_expert_intermediate_size": 48, "norm_topk_prob": True},
    "qwen2_moe with dense layers and windows": QWEN
    | {
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3_moe": QWEN | {"head_dim": 24, "norm_topk_prob": True},
    "qwen3_moe with dense layers and a window": QWEN
    | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 5},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "olmoe with biases": {"num_experts": 8, "norm_topk_prob": True, "attention_bias": True},
    "olmoe with clipped queries": {"num_experts": 8, "clip_qkv": 0.8},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 3},
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE | {"shared_intermediate_size": 48},
    "granitemoe_swa": GRANITE
    | {
        "shared_intermediate_size": 48,
        "sliding_window": 5,
        "layer_types": SLIDING_FIRST,
        "layer_rope_theta": [5000.0, 0, 5000.0],
    },
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5}
    | {"head_dim": 16, "swiglu_limit": 1.5},
    "ernie4_5_moe": ERNIE | {"head_dim": 24},
    "ernie4_5_moe with intervals": ERNIE
    | {
        "num_hidden_layers": 5,
        "moe_layer_interval": 2,
        "moe_layer_start_index": 2,
        "moe_layer_end_index": 3,
        "moe_num_shared_experts": 0,
    },
    "ernie4_5_moe with biases": ERNIE | {"use_bias": True, "moe_norm_min": 0.7},
    "ernie4_5_moe with a head of its own": ERNIE | {"use_bias": True, "tie_word_embeddings": False},
    "glm4_moe": GROUPED | {"head_dim": 24, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe without groups": GROUPED
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False},
    "dots1": GROUPED | {"head_dim": 24, "n_shared_experts": 2, "norm_topk_prob": True},
    "dots1 with a window": GROUPED
    | {"n_shared_experts": 1, "sliding_window": 5, "layer_types": SLIDING_FIRST},
    "hunyuan_v1_moe": HUNYUAN,
    "hunyuan_v1_moe with a larger base": HUNYUAN
    | {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": DYNAMIC,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 24},
    "minimax_m2 rotated in part": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "rotary_dim": 16,
    },
    "phimoe": {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True},
    "phimoe with LongRoPE": {
        "num_local_experts": 8,
        "sliding_window": 9,
        "router_jitter_noise": 0.2,
        "rope_parameters": LONGROPE,
    },
}


def tiny_mixture(case: str, **differences: Any) -> Any:
    """Make the random model of a case."""
    return random_model(case, TINY | MIXTURES[case] | differences)


def reference(model: Any) -> Floats:
    with torch.inference_mode():
        logits: Floats = model(torch.tensor([PROMPT])).logits[0].numpy()
    return logits


def batch(parts: list[tuple[list[int], int, list[int]]]) -> Batch:
    """Return a step of some sequences: tokens, the first one's position, and pages."""
    lengths = [len(tokens) for tokens, _, _ in parts]
    return Batch(
        token_ids=np.concatenate([tokens for tokens, _, _ in parts]).astype(np.int32),
        positions=np.concatenate([np.arange(len(t)) + at for t, at, _ in parts]).astype(np.int32),
        sequences=np.repeat(np.arange(len(parts)), lengths).astype(np.int32),
        page_table=np.array([pages for _, _, pages in parts], np.int32),
        logit_rows=np.arange(sum(lengths), dtype=np.int32),
    )


def all_ways(executor: Executor) -> dict[str, Floats]:
    """Return the prompt's logits: alone, in chunks beside a stranger, after a cache, preempted.

    The preempted one is computed token by token, then again as a whole, after a stranger has had
    its pages. Pages have 16 tokens; the executor has 8 of them.
    """
    alone = executor.forward(batch([(PROMPT, 0, [3, 0])]))
    chunks = []
    for start, stop in itertools.pairwise([0, 7, len(PROMPT) - 1, len(PROMPT)]):
        step = batch([(STRANGER, 0, [5, 5]), (PROMPT[start:stop], start, [6, 1])])
        chunks.append(executor.forward(step)[len(STRANGER) :])
    cached = executor.forward(batch([(PROMPT[16:], 16, [3, 7])]))  # its first page is another's
    begun = [executor.forward(batch([(PROMPT[i : i + 1], i, [2, 4])])) for i in range(6)]
    beside = [(STRANGER, 0, [2, 2]), (PROMPT[:18], 0, [4, 7])]
    resumed = [executor.forward(batch(beside))[len(STRANGER) :]]
    resumed += [executor.forward(batch([(PROMPT[i : i + 1], i, [4, 7])])) for i in (18, 19)]
    return {
        "alone": alone,
        "chunked": np.concatenate(chunks),
        "cached": np.concatenate([alone[:16], cached]),
        "begun": np.concatenate([*begun, alone[6:]]),
        "preempted": np.concatenate(resumed),
    }


GREEDY_PROMPTS = [PROMPT[:5], PROMPT, PROMPT[7:16]]
NUM_TOKENS = 24


def greedy_together(executor: Executor, chunk: int, preempted_at: int) -> list[list[int]]:
    """Return what follows `GREEDY_PROMPTS` in one batch, at most `chunk` tokens of each in a step.

    After so many steps the second text is preempted: it is computed again, on other pages. The
    executor has 12 pages.
    """
    texts, done = [list(prompt) for prompt in GREEDY_PROMPTS], [0] * len(GREEDY_PROMPTS)
    pages = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    ends = [len(prompt) + NUM_TOKENS for prompt in GREEDY_PROMPTS]
    step = 0
    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        if step == preempted_at:
            done[1], pages[1] = 0, [11, 9, 10]
        open_ones = [i for i in range(len(texts)) if len(texts[i]) < ends[i]]
        parts = [(texts[i][done[i] : done[i] + chunk], done[i], pages[i]) for i in open_ones]
        logits = executor.forward(batch(parts))
        last = np.cumsum([len(tokens) for tokens, _, _ in parts]) - 1
        for i, (tokens, start, _), row in zip(open_ones, parts, last, strict=True):
            done[i] = start + len(tokens)
            if done[i] == len(texts[i]):
                texts[i].append(int(logits[row].argmax()))
        step += 1
    return [text[-NUM_TOKENS:] for text in texts]


def check(path: Path, expected: Floats, atol: float = 3e-5) -> None:
    """Compare the logits of a model's files with those of transformers, by every executor."""
    assert np.abs(expected).max() > 1  # a model that says nothing agrees with anything
    model = open_model(path)
    for by, make in EXECUTORS.items():
        ways = all_ways(make(model.spec, model.weights))
        for way, logits in ways.items():
            text = f"{way}, by {by}"
            np.testing.assert_allclose(logits, expected, atol=atol, rtol=0, err_msg=text)
            np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1), text)
        if by == "core":  # batch mates and chunks change no bit
            for way, logits in ways.items():
                np.testing.assert_array_equal(logits, ways["alone"], way)
