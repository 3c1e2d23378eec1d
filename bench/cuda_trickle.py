"""Measure the latency of a small model on a GPU when requests trickle in, and its peak throughput.

Method: roseinfer's setting, a model of GPT-2's size with random weights. 64 requests come every 20
        ms, each with 128 tokens to generate, 8 per event. Then many of them at once, which shows
        what the server can do. Its figures there: 2,150 tok/s, TTFT 7.6 ms, TPOT 21 ms.
Run:    python bench/cuda_trickle.py --rounds 5
"""

from support.report import Quantity, Report
from support.serving import lacks_gpu, load, serve, serving_parser

NUM_REQUESTS, EVERY_S = 64, 0.020
NUM_AT_ONCE = 512
PROMPT_TOKENS = 32
FLAGS = ("--stream-interval", "8", "--max-num-seqs", "256", "--max-num-batched-tokens", "2048")


def main() -> None:
    """Run."""
    options = serving_parser(__doc__, rounds=5, shape="gpt2")
    options.add_argument("--tokens", type=int, default=128, help="of each answer")
    options.add_argument("--at-once", type=int, default=NUM_AT_ONCE, help="requests, of capacity")
    args = options.parse_args()
    report = Report("cuda_trickle", args)
    if lacks_gpu(report, args.device, "a small model on a GPU"):
        report.finish()
        return
    each = (PROMPT_TOKENS, args.tokens)
    with serve(args, *FLAGS) as server:
        load(server, [each] * 8, seed=1)
        slow = [load(server, [each] * NUM_REQUESTS, EVERY_S, 2 + i) for i in range(args.rounds)]
        fast = [load(server, [each] * args.at_once, seed=100 + i) for i in range(args.rounds)]
    every = f"a request every {1e3 * EVERY_S:g} ms"
    for name, unit in (("ttft_ms", "ms to the first token"), ("tpot_ms", "ms per token")):
        report.add(Quantity(every, unit, {"headrace": [getattr(one, name) for one in slow]}))
    at_once = {"headrace": [one.tokens_per_s for one in fast]}
    report.add(Quantity(f"{args.at_once} at once", "tok/s", at_once, higher_is_better=True))
    report.finish()


if __name__ == "__main__":
    main()
