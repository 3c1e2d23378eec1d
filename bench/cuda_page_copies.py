"""Measure copies between a GPU and pinned memory of the host, and what they cost the steps beside.

Method: a decoder of Qwen2.5-7B's shape, or another's, with random weights and pages for 64 tokens
        with 4,096 keys each. The host's memory is pinned as `--kv-store-bytes` pins it. A round
        copies 256 pages out, then in; its figure is bytes per second. Then decode steps run with
        copies beside them, and without.
Run:    python bench/cuda_page_copies.py --rounds 5
"""

import argparse
import os
import time
from array import array
from collections.abc import Callable

import torch

from cuda_decode import PAGE_TOKENS, decode_batch, make_executor
from headrace.engine_proc.shm.cache_memory import CacheMemory
from headrace.engine_proc.shm.page_memory import whole
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.cuda_page_copier import CudaPageCopier
from headrace.engine_proc.worker.cuda.pinned_memory import pin
from headrace.engine_proc.worker.execution.cache_split import CacheSplit
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.model import open_model
from headrace.ipc.worker_messages import CopyPages
from support.report import Quantity, Report
from support.serving import lacks_gpu, serving_parser
from support.shapes import shape_folder

WARM_UPS = 1
GIB = 1 << 30
ALONE, BESIDE = "alone", "copies beside"


def pinned_copier(executor: CudaExecutor, num_pages: int) -> tuple[CudaPageCopier, float]:
    """Return what copies between an executor and pinned memory, and GiB/s of the pinning."""
    page_bytes = executor.kv.page_bytes
    num_bytes = whole(num_pages * page_bytes)
    memory = CacheMemory(os.memfd_create("host pages"), num_bytes, bytes(16))
    began = time.perf_counter()
    if executor.device.type == "cuda":
        pin(memory.address, num_bytes, torch.cuda.cudart().cudaHostRegister)
    took_s = time.perf_counter() - began
    split = CacheSplit(num_pages, 0)
    return CudaPageCopier(
        executor.kv.groups, executor.states, memory, split
    ), num_bytes / GIB / took_s


def copies_of(num_pages: int, to_host: bool) -> CopyPages:
    """Return the message that asks for copies of the first pages."""
    pages = array("i", range(num_pages)).tobytes()
    return CopyPages(to_host, pages, pages)


def copy_seconds(copier: CudaPageCopier, copies: CopyPages) -> float:
    """Return the seconds of a copy by itself, from the request to the answer."""
    began = time.perf_counter()
    copier.begin(copies)
    while copier.settle(lambda _: None):
        pass
    return time.perf_counter() - began


def step_ms(
    executor: CudaExecutor,
    batch: Batch,
    num_steps: int,
    wait: Callable[[], None],
    copier: CudaPageCopier | None = None,
) -> float:
    """Return the milliseconds of a step, with a copier's work launched between steps."""
    wait()
    began = time.perf_counter()
    for _ in range(num_steps):
        executor.logits(batch)
        if copier is not None:
            copier.settle(lambda _: None)
    wait()
    return 1e3 * (time.perf_counter() - began) / num_steps


def parse() -> argparse.Namespace:
    """Return the arguments."""
    options = serving_parser(__doc__, rounds=5, shape="qwen2.5-7b")
    options.add_argument("--sequences", type=int, default=64)
    options.add_argument("--context", type=int, default=4096, help="tokens in each cache")
    options.add_argument("--pages", type=int, default=256, help="copied at once")
    options.add_argument("--steps", type=int, default=20, help="of a round")
    return options.parse_args()


def main() -> None:
    """Run."""
    args = parse()
    report = Report("cuda_page_copies", args)
    if lacks_gpu(report, args.device, "copies between a GPU and the host"):
        report.finish()
        return
    spec = open_model(shape_folder(args.shape), "dummy").spec
    executor = make_executor(spec, [args.sequences], args.context, args.device)
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    copier, pinning = pinned_copier(executor, args.pages)
    num_bytes = args.pages * executor.kv.page_bytes
    rates: dict[bool, list[float]] = {True: [], False: []}
    batch = decode_batch(args.sequences, args.context)
    steps: dict[str, list[float]] = {ALONE: [], BESIDE: []}
    for index in range(WARM_UPS + args.rounds):
        for to_host, found in rates.items():
            seconds = copy_seconds(copier, copies_of(args.pages, to_host))
            if index >= WARM_UPS:
                found.append(num_bytes / seconds / 1e9)
        for name, own in ((ALONE, None), (BESIDE, copier)):
            if own is not None:
                own.begin(copies_of(args.pages, to_host=True))
            milliseconds = step_ms(executor, batch, args.steps, wait, own)
            if index >= WARM_UPS:
                steps[name].append(milliseconds)
        while copier.settle(lambda _: None):
            pass
    for to_host, name in ((True, "to the host"), (False, "to the GPU")):
        title = f"{args.pages} pages of {PAGE_TOKENS} tokens {name}"
        report.add(Quantity(title, "GB/s", {"headrace": rates[to_host]}, higher_is_better=True))
    report.add(Quantity(f"decode B={args.sequences} context {args.context}", "ms", steps))
    report.add(Quantity("pinning", "GiB/s", {"headrace": [pinning]}, higher_is_better=True))
    report.finish()


if __name__ == "__main__":
    main()
