"""Measure a decode step on a GPU, with CUDA graphs and without, beside its floor.

Method: a decoder of Qwen2.5-1.5B's shape, or another's, with random weights, bf16. A step has one
        token of each of B sequences, whose caches hold `context` tokens. It is sent and computed up
        to its logits, which stay on the GPU. A round is 20 steps one after the other without
        waiting; its figure is for one step. "floor" is what reading weights, keys and values once
        would take.
Run:    python bench/cuda_decode.py --rounds 20
        python bench/cuda_decode.py --rounds 20 --shape qwen2.5-7b --sequences 1
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Buckets, Sizes
from headrace.engine_proc.worker.cuda.graphs import CudaGraphs
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.dummy_weights import dummy_weights
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from support.report import Quantity, Report
from support.serving import lacks_gpu, serving_parser
from support.shapes import shape_folder

PAGE_TOKENS = 32
NUMBER_BYTES = 2
WARM_UPS = 3
GRAPH, EAGER, FLOOR = "graphs", "eager", "floor"


def floor_ms(spec: DecoderSpec, num_sequences: int, context: int, bytes_per_s: float) -> float:
    """Return the time to read the weights of a step, ms; of an embedding, only a tied head
    counts."""
    shapes = weight_shapes(spec)
    is_read = {name: name != "embed" or "head" not in shapes for name in shapes}
    matrices = sum(int(np.prod(shape)) for name, shape in shapes.items() if is_read[name])
    per_token = len(spec.layers) * 2 * spec.num_kv_heads * spec.head_dim
    numbers = matrices + num_sequences * context * per_token
    return 1e3 * NUMBER_BYTES * numbers / bytes_per_s


def decode_batch(num_sequences: int, context: int) -> Batch:
    """Make one new token for each sequence."""
    num_pages = context // PAGE_TOKENS + 1
    ids = np.arange(num_sequences, dtype=np.int32)
    table = np.arange(num_sequences * num_pages, dtype=np.int32).reshape(num_sequences, num_pages)
    return Batch(ids + 1, np.full(num_sequences, context, np.int32), ids, table, ids)


def make_executor(spec: DecoderSpec, sizes: list[int], context: int, device: str) -> CudaExecutor:
    """Load the decoder, with pages for the largest batch."""
    most = max(sizes)
    return CudaExecutor(
        spec,
        dummy_weights(spec),
        num_pages=most * (context // PAGE_TOKENS + 1),
        page_tokens=PAGE_TOKENS,
        device=device,
        largest=Sizes(most, most, most),
    )


def measure(
    executor: CudaExecutor, batch: Batch, args: argparse.Namespace, wait: Callable[[], None]
) -> list[float]:
    """Return the milliseconds of a step, round by round.

    Args:
        wait: returns when the device is done.
    """
    times = []
    for _ in range(WARM_UPS + args.rounds):
        wait()
        began = time.perf_counter()
        for _ in range(args.steps):
            executor.logits(batch)
        wait()
        times.append(1e3 * (time.perf_counter() - began) / args.steps)
    return times[WARM_UPS:]


def main() -> None:
    """Run."""
    options = serving_parser(__doc__, rounds=20, shape="qwen2.5-1.5b")
    options.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    options.add_argument("--context", type=int, default=512, help="tokens in each cache")
    options.add_argument("--steps", type=int, default=20, help="of a round")
    options.add_argument("--tb-per-s", type=float, default=4.3, help="of the GPU's memory, read")
    args = options.parse_args()
    report = Report("cuda_decode", args)
    if lacks_gpu(report, args.device, "a decode step on a GPU"):
        report.finish()
        return
    spec = open_model(shape_folder(args.shape), "dummy").spec
    executor = make_executor(spec, args.sequences, args.context, args.device)
    batches = {size: decode_batch(size, args.context) for size in args.sequences}
    is_gpu = args.device == "cuda"
    wait = torch.cuda.synchronize if is_gpu else lambda: None
    samples = {
        size: {EAGER: measure(executor, batch, args, wait)} for size, batch in batches.items()
    }
    if is_gpu:
        executor.capture(Buckets(Sizes(size, size, size) for size in batches), CudaGraphs)
    for size, batch in batches.items():
        if is_gpu:
            samples[size][GRAPH] = measure(executor, batch, args, wait)
        floor = floor_ms(spec, size, args.context, args.tb_per_s * 1e12)
        samples[size][FLOOR] = [floor] * args.rounds
        report.add(Quantity(f"decode B={size} context {args.context}", "ms", samples[size]))
    report.finish()


if __name__ == "__main__":
    main()
