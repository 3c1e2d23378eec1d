"""Measure tokens per second on a GPU, beside transformers' continuous batching.

Method: Qwen2.5-1.5B's shape, bf16, random weights in both. As many prompts of random tokens are
    continued by as many tokens, greedily. In each round transformers' `generate_batch` runs in this
    process, then a server over HTTP, on the same GPU.
Run:    python bench/cuda_generate_batch.py --rounds 3
"""

import argparse
import time
from typing import Any

import numpy as np

from support.report import Quantity, Report
from support.serving import END_TOKEN, FIRST_TOKEN, lacks_gpu, load, serve, serving_parser
from support.shapes import shape_folder

OURS, THEIRS = "headrace", "transformers"
ATTENTION = "paged|sdpa"


def make_theirs(shape: str, device: str) -> Any:
    """Return a model of the shape in transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(shape_folder(shape))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    torch.set_default_dtype(torch.float32)
    return model.to(device).eval()


def theirs(model: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """Return the tokens a second of transformers."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0, do_sample=False
    )
    began = time.perf_counter()
    answers = model.generate_batch(prompts, generation_config=config)
    took = time.perf_counter() - began
    generated = sum(len(answer.generated_tokens) for answer in answers.values())
    assert generated == len(prompts) * num_tokens, f"{generated} tokens were generated"
    return generated / took


def empty_cache() -> None:
    """Give memory back that torch keeps."""
    import torch

    torch.cuda.empty_cache()


def ours(args: argparse.Namespace) -> float:
    """Return the tokens a second of a server of our own, which has the GPU to itself."""
    lengths = [(args.prompt, args.tokens)] * args.requests
    flags = ("--max-num-seqs", str(args.requests), "--max-num-batched-tokens", "8192")
    with serve(args, *flags) as server:
        load(server, lengths[:8], seed=1)
        return load(server, lengths).tokens_per_s


def main() -> None:
    """Run."""
    options = serving_parser(__doc__, rounds=3, shape="qwen2.5-1.5b")
    options.add_argument("--requests", type=int, default=256)
    options.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    options.add_argument("--tokens", type=int, default=256, help="of each answer")
    args = options.parse_args()
    report = Report("cuda_generate_batch", args)
    if lacks_gpu(report, args.device, "transformers' continuous batching beside ours"):
        report.finish()
        return
    random = np.random.default_rng(0)
    ids = random.integers(FIRST_TOKEN, END_TOKEN, (args.requests, args.prompt)).tolist()
    samples: dict[str, list[float]] = {OURS: [], THEIRS: []}
    for _ in range(args.rounds):
        model = make_theirs(args.shape, args.device)
        theirs(model, ids[:8], args.tokens)
        samples[THEIRS].append(theirs(model, ids, args.tokens))
        del model
        if args.device == "cuda":
            empty_cache()
        samples[OURS].append(ours(args))
    name = f"{args.requests} prompts, {args.tokens} tokens each"
    report.add(Quantity(name, "tok/s", samples, higher_is_better=True))
    report.finish()


if __name__ == "__main__":
    main()
