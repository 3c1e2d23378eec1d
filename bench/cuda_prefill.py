"""Measure a long prompt on a GPU, beside the peak of its tensor cores.

Method: a decoder of Qwen2.5-7B's shape with random weights, bf16: one step with one prompt of 8,192
        tokens, up to the logits of its last. Operations are two for each number of each matrix
        and token, and those of attention; "peak" is what these would take at --tflops.
Run:    python bench/cuda_prefill.py --rounds 10
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.dummy_weights import dummy_weights
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from support.report import Quantity, Report
from support.serving import lacks_gpu, serving_parser
from support.shapes import shape_folder

PAGE_TOKENS = 32
WARM_UPS = 2


def operations(spec: DecoderSpec, num_tokens: int) -> float:
    """Return the floating-point operations of a prompt, of which one token has logits."""
    shapes = weight_shapes(spec)
    matrices = sum(
        float(np.prod(shape))
        for name, shape in shapes.items()
        if len(shape) == 2 and name.startswith("layers.")
    )
    head = float(spec.vocab_size * spec.hidden_size)
    pairs = num_tokens * (num_tokens + 1) / 2  # of a token and one that it sees
    attention = 2 * pairs * spec.num_heads * spec.head_dim * len(spec.layers)  # scores, and sums
    return 2 * (matrices * num_tokens + head + attention)


def prompt_batch(num_tokens: int) -> Batch:
    """Make one prompt, whose last token has logits."""
    positions = np.arange(num_tokens, dtype=np.int32)
    table = np.arange(-(-num_tokens // PAGE_TOKENS), dtype=np.int32)[None]
    first = np.zeros(num_tokens, np.int32)
    return Batch(positions % 1000, positions, first, table, positions[-1:])


def make_executor(spec: DecoderSpec, num_tokens: int, device: str) -> CudaExecutor:
    """Load the decoder, with pages for the prompt."""
    return CudaExecutor(
        spec,
        dummy_weights(spec),
        num_pages=-(-num_tokens // PAGE_TOKENS),
        page_tokens=PAGE_TOKENS,
        device=device,
        largest=Sizes(num_tokens, 1, 1),
        max_model_len=num_tokens,
    )


def measure(
    executor: CudaExecutor, batch: Batch, rounds: int, wait: Callable[[], None]
) -> list[float]:
    """Return the milliseconds of a prompt, round by round.

    Args:
        wait: returns when the device is done.
    """
    times = []
    for _ in range(WARM_UPS + rounds):
        wait()
        began = time.perf_counter()
        executor.logits(batch)
        wait()
        times.append(1e3 * (time.perf_counter() - began))
    return times[WARM_UPS:]


def main() -> None:
    """Run."""
    options = serving_parser(__doc__, rounds=10, shape="qwen2.5-7b")
    options.add_argument("--tokens", type=int, default=8192, help="of the prompt")
    options.add_argument("--tflops", type=float, default=790, help="peak of bf16, measured")
    args = options.parse_args()
    report = Report("cuda_prefill", args)
    if lacks_gpu(report, args.device, "a prompt on a GPU"):
        report.finish()
        return
    spec = open_model(shape_folder(args.shape), "dummy").spec
    executor = make_executor(spec, args.tokens, args.device)
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    times = measure(executor, prompt_batch(args.tokens), args.rounds, wait)
    peak = 1e3 * operations(spec, args.tokens) / (args.tflops * 1e12)
    name = f"a prompt of {args.tokens} tokens"
    report.add(Quantity(name, "ms", {"headrace": times, "peak": [peak] * len(times)}))
    report.finish()


if __name__ == "__main__":
    main()
