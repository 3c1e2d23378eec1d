"""How long does a decode step take on a GPU, with CUDA graphs and without, beside its floor?

Method: a decoder of Qwen2.5-1.5B's shape with random weights, bf16. A step has one token of each of
        B sequences, whose caches hold `context` tokens: sent, computed up to its logits, which stay
        on the GPU. A round is 20 steps one after the other without waiting, between two events; its
        figure is for one step. "floor" is what reading weights, keys and values once would take.
Run:    python bench/cuda_decode.py --rounds 20
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.engine_proc.worker.dummy_weights import dummy_weights
from headrace.engine_proc.worker.executor import Batch
from headrace.engine_proc.worker.names import weight_shapes
from headrace.engine_proc.worker.spec import DecoderSpec, LayerSpec, RopeTable
from support.report import Quantity, Report, parser

if TYPE_CHECKING:
    from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor

SPEC = DecoderSpec(
    architecture="Qwen2ForCausalLM",
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    max_position=32768,
    layers=(LayerSpec(),) * 28,
    ropes=(RopeTable(inv_freq=tuple(1_000_000 ** (-i / 64) for i in range(64))),),
    norm_eps=1e-6,
    qkv_bias=True,
    attention_scale=128**-0.5,
)
PAGE_TOKENS = 32
NUMBER_BYTES = 2
CHAIN = 20
WARM_UPS = 3
GRAPH, EAGER, FLOOR = "graphs", "eager", "floor"


def floor_ms(num_sequences: int, context: int, bytes_per_s: float) -> float:
    """Return what reading all that a step needs takes."""
    matrices = sum(int(np.prod(shape)) for shape in weight_shapes(SPEC).values())
    per_token = len(SPEC.layers) * 2 * SPEC.num_kv_heads * SPEC.head_dim
    numbers = matrices + num_sequences * context * per_token
    return 1e3 * NUMBER_BYTES * numbers / bytes_per_s


def decode_batch(num_sequences: int, context: int) -> Batch:
    """Make one new token for each sequence."""
    num_pages = context // PAGE_TOKENS + 1
    ids = np.arange(num_sequences, dtype=np.int32)
    table = np.arange(num_sequences * num_pages, dtype=np.int32).reshape(num_sequences, num_pages)
    return Batch(ids + 1, np.full(num_sequences, context, np.int32), ids, table, ids)


def make_executor(sizes: list[int], context: int) -> "CudaExecutor":
    """Load the decoder, with pages for the largest batch."""
    from headrace.engine_proc.worker.cuda.buckets import Sizes
    from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor

    most = max(sizes)
    return CudaExecutor(
        SPEC,
        dummy_weights(SPEC),
        num_pages=most * (context // PAGE_TOKENS + 1),
        page_tokens=PAGE_TOKENS,
        largest=Sizes(most, most, most),
    )


def measure(executor: "CudaExecutor", batch: Batch, rounds: int) -> list[float]:
    """Return the milliseconds of a step, round by round."""
    times = []
    for _ in range(WARM_UPS + rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CHAIN):
            executor.logits(batch)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CHAIN)
    return times[WARM_UPS:]


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=20)
    options.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    options.add_argument("--context", type=int, default=512, help="tokens in each cache")
    options.add_argument("--tb-per-s", type=float, default=4.3, help="of the GPU's memory, read")
    args = options.parse_args()
    report = Report("cuda_decode", args)
    if not torch.cuda.is_available():
        report.miss("a decode step on a GPU: this machine has none")
        report.finish()
        return
    from headrace.engine_proc.worker.cuda.buckets import Buckets, Sizes
    from headrace.engine_proc.worker.cuda.graphs import CudaGraphs

    executor = make_executor(args.sequences, args.context)
    batches = {size: decode_batch(size, args.context) for size in args.sequences}
    eager = {size: measure(executor, batch, args.rounds) for size, batch in batches.items()}
    executor.capture(Buckets(Sizes(size, size, size) for size in batches), CudaGraphs)
    for size, batch in batches.items():
        floor = floor_ms(size, args.context, args.tb_per_s * 1e12)
        samples = {GRAPH: measure(executor, batch, args.rounds), EAGER: eager[size]}
        samples[FLOOR] = [floor] * args.rounds
        report.add(Quantity(f"decode B={size} context {args.context}", "ms", samples))
    report.finish()


if __name__ == "__main__":
    main()
