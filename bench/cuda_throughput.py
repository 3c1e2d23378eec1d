"""Measure requests per second of a GPU when all arrive at once.

Method: Qwen2.5-1.5B's shape with random weights, bf16, served over HTTP. 1,000 requests at once,
        of lengths spread as ShareGPT's are: log-normal, prompts of some 190 tokens on average and
        answers of 195, none above 1,024. Prompts are random tokens, so no prefix is shared.
Run:    python bench/cuda_throughput.py --rounds 3
"""

import numpy as np

from support.report import Quantity, Report
from support.serving import Lengths, lacks_gpu, load, serve, serving_parser

MAX_TOKENS = 1024
FLAGS = ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--target-itl-ms", "0")


def sharegpt_lengths(count: int, longest: int = MAX_TOKENS) -> Lengths:
    """Return the lengths of prompts and answers."""
    random = np.random.default_rng(0)
    prompts = random.lognormal(4.6, 1.2, count).clip(4, longest).astype(int)
    answers = random.lognormal(4.9, 0.9, count).clip(4, longest).astype(int)
    return list(zip(prompts.tolist(), answers.tolist(), strict=True))


def main() -> None:
    """Run."""
    options = serving_parser(__doc__, rounds=3, shape="qwen2.5-1.5b")
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--longest", type=int, default=MAX_TOKENS, help="tokens of a prompt")
    args = options.parse_args()
    report = Report("cuda_throughput", args)
    if lacks_gpu(report, args.device, "throughput on a GPU"):
        report.finish()
        return
    lengths = sharegpt_lengths(args.requests, args.longest)
    with serve(args, *FLAGS, "--max-num-queued", str(args.requests)) as server:
        load(server, lengths[: min(64, len(lengths))], seed=1)
        rounds = [load(server, lengths, seed=2 + i) for i in range(args.rounds)]
    for name, unit, is_rate in (
        ("requests_per_s", "requests/s", True),
        ("tokens_per_s", "tok/s", True),
        ("tpot_ms", "ms per token", False),
        ("ttft_ms", "ms to the first token", False),
    ):
        samples = {"headrace": [getattr(served, name) for served in rounds]}
        report.add(Quantity(f"{args.requests} requests at once", unit, samples, is_rate))
    report.finish()


if __name__ == "__main__":
    main()
