"""Measure products, experts and attention on a GPU, beside cuBLASLt and FlashInfer.

Method: matrices of a model's layer, random, bf16, with 1 to 4,096 rows: our product, and torch's,
        which is cuBLASLt's. Then our products of the same sizes in fewer bits. Then attention of 64
        tokens with 4,096 keys each, and of a prompt of 4,096: ours, and FlashInfer's if it is
        installed. The prompt is attended to in wide tiles and in others, and by torch, which has
        FlashAttention. Then one of 64 tokens has most of the keys. A round is a CUDA graph of some
        calls, in turns; its figure is for one call. Calls go through copies of a matrix that no
        cache holds together.
Run:    python bench/cuda_kernels.py --rounds 20
"""

import argparse
import importlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.attention.paged_attention import (
    TILING,
    attend,
    scheduler_of,
    tiling_of,
)
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Stretches, Tiling
from headrace.engine_proc.worker.cuda.kernels.e4m3_rows import E4M3
from headrace.engine_proc.worker.cuda.matrices.dense import DenseMatrix
from headrace.engine_proc.worker.cuda.matrices.fp8 import Fp8Matrix
from headrace.engine_proc.worker.cuda.matrices.int4 import Int4Matrix
from headrace.engine_proc.worker.cuda.matrices.matrices import Matrix
from headrace.engine_proc.worker.cuda.mixtures.expert_activation import ExpertActivation
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import (
    ExpertFormat,
    ExpertWeights,
    activated_expert_linear,
)
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import sort_by_expert
from headrace.engine_proc.worker.cuda.mixtures.router import choose_experts
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    MixtureSpec,
)
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from support.report import Quantity, Report
from support.serving import lacks_gpu, serving_parser
from support.shapes import shape_folder

PAGE_TOKENS = 32
ROWS = (1, 16, 64, 256, 4096)
MATRICES = ("q", "o", "gate", "down")
WARM_UPS = 3
MIXTURE = MixtureSpec(num_experts=16, experts_per_token=4, intermediate_size=768)
GROUP = 128  # terms under a scale
MANY_BYTES = 1 << 28  # several times a cache of 50 MB
OURS, CUBLASLT, FLASHINFER, FLASH = "headrace", "cuBLASLt", "FlashInfer", "FlashAttention"
NARROW = "tiles of 64 rows"
Call = Callable[[], object]


def measure(
    calls: dict[str, list[Call]], args: argparse.Namespace, wait: Callable[[], None]
) -> dict[str, list[float]]:
    """Return the microseconds of each system's call, round by round.

    Args:
        calls: by system, equal ones that read other memory.
        args: has the rounds, and the calls of each.
        wait: returns when the device is done.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    together = {name: run_of(some, args) for name, some in calls.items()}
    for index in range(WARM_UPS + args.rounds):
        for name, run in together.items():
            wait()
            began = time.perf_counter()
            run()
            wait()
            if index >= WARM_UPS:
                times[name].append(1e6 * (time.perf_counter() - began) / args.calls)
    return times


def run_of(calls: list[Call], args: argparse.Namespace) -> Call:
    """Return what makes a round's calls, in turns: on a GPU, a graph of them."""

    def make_all() -> None:
        for _, call in zip(range(args.calls), itertools.cycle(calls), strict=False):
            call()

    if args.device != "cuda":
        return make_all
    calls[0]()  # compiles; a graph must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        make_all()
    return graph.replay


def products(
    spec: DecoderSpec, num_rows: int, device: str
) -> Iterator[tuple[str, dict[str, list[Call]]]]:
    """Yield a layer's products with some rows."""
    shapes = weight_shapes(spec)
    bf16: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    for name in MATRICES:
        num_columns, num_terms = shapes[f"layers.0.{name}"]
        num_copies = -(-MANY_BYTES // (2 * num_columns * num_terms)) if device == "cuda" else 1
        weights = [torch.randn(num_columns, num_terms, **bf16) for _ in range(num_copies)]
        x = torch.randn(num_rows, num_terms, **bf16)
        calls: dict[str, list[Call]] = {
            OURS: [partial(DenseMatrix(weight).apply, x) for weight in weights],
            CUBLASLT: [partial(F.linear, x, weight) for weight in weights],
        }
        yield f"{name}, {num_columns} x {num_terms}, {num_rows} rows", calls


def packed(
    spec: DecoderSpec, num_rows: int, device: str
) -> Iterator[tuple[str, dict[str, list[Call]]]]:
    """Yield a layer's products with matrices in fewer bits, by format."""
    shapes = weight_shapes(spec)
    for name in MATRICES:
        num_columns, num_terms = shapes[f"layers.0.{name}"]
        x = torch.randn(num_rows, num_terms, device=device, dtype=torch.bfloat16)
        codes = torch.randint(0, 120, (num_columns, num_terms), device=device, dtype=torch.uint8)
        numbers = codes.view(E4M3)
        scales = torch.rand(num_columns, -(-num_terms // GROUP), device=device)
        pairs = codes[:, : num_terms // 2].contiguous()
        matrices: dict[str, Matrix] = {
            "fp8 by row": Fp8Matrix(numbers, scales[:, :1].contiguous(), num_terms, None),
            "fp8 in blocks": Fp8Matrix(numbers, scales, GROUP, None),
            "int4": Int4Matrix(pairs, scales.byte(), scales, GROUP),
        }
        if num_terms % GROUP:  # blocks are whole
            matrices = {"fp8 by row": matrices["fp8 by row"]}
        calls = {system: [partial(own.apply, x)] for system, own in matrices.items()}
        yield f"{name}, {num_columns} x {num_terms}, {num_rows} rows, by format", calls


def formats(spec: DecoderSpec, num_rows: int, device: str) -> dict[str, list[Call]]:
    """Return the calls that multiply rows with the gates of their experts, by format."""
    width, num_terms = 2 * MIXTURE.intermediate_size, spec.hidden_size
    rows = MIXTURE.num_experts * width
    x = torch.randn(num_rows, num_terms, device=device, dtype=torch.bfloat16)
    logits = torch.randn(num_rows, MIXTURE.num_experts, device=device)
    choice = choose_experts(MIXTURE, logits, None, torch.zeros(num_rows, device=device))
    tiles, gate = sort_by_expert(MIXTURE, choice, x.dtype), ExpertActivation(Activation.SILU)
    codes = torch.randint(0, 120, (rows, num_terms), device=device, dtype=torch.uint8)
    pairs = codes[:, : num_terms // 2].contiguous()
    scales = torch.rand(rows, -(-num_terms // 128), device=device)
    exponents = torch.full((rows, num_terms // 32), 120, device=device, dtype=torch.uint8)
    held = {
        "fp8": ExpertWeights(codes.view(E4M3), None, ExpertFormat.FP8, scales, group_size=128),
        "int4": ExpertWeights(pairs, None, ExpertFormat.INT4, scales, scales.byte(), 128),
        "mxfp4": ExpertWeights(pairs, None, ExpertFormat.MXFP4, exponents, group_size=32),
    }
    return {
        name: [partial(activated_expert_linear, x, weights, tiles, gate)]
        for name, weights in held.items()
    }


def experts(spec: DecoderSpec, num_rows: int, device: str) -> dict[str, list[Call]]:
    """Return the calls that multiply rows with the gates of their experts."""
    bf16 = {"device": device, "dtype": torch.bfloat16}
    width = 2 * MIXTURE.intermediate_size
    weight = torch.randn(MIXTURE.num_experts, width, spec.hidden_size, **bf16)
    x = torch.randn(num_rows, spec.hidden_size, **bf16)
    logits = torch.randn(num_rows, MIXTURE.num_experts, device=device)
    choice = choose_experts(MIXTURE, logits, None, torch.zeros(num_rows, device=device))
    tiles, gate = sort_by_expert(MIXTURE, choice, x.dtype), ExpertActivation(Activation.SILU)
    matrices = ExpertWeights(weight.flatten(0, 1))
    own = [(choice.experts == expert).any(1).nonzero()[:, 0] for expert in range(len(weight))]
    chosen = [(expert, rows) for expert, rows in enumerate(own) if len(rows)]

    def one_by_one() -> None:
        for expert, rows in chosen:
            gates, ups = F.linear(x[rows], weight[expert]).chunk(2, 1)
            torch.mul(F.silu(gates), ups)

    return {
        OURS: [lambda: activated_expert_linear(x, matrices, tiles, gate)],
        CUBLASLT: [one_by_one],
    }


def attention(
    spec: DecoderSpec,
    num_sequences: int,
    num_queries: int,
    num_keys: int,
    device: str,
    keys_of_others: int | None = None,
) -> dict[str, Call]:
    """Return the calls that attend from each sequence's last tokens to all of its keys.

    Args:
        keys_of_others: than the first sequence; then no library's call is among them.
    """
    num_pages = -(-num_keys // PAGE_TOKENS)
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    bf16 = {"device": device, "dtype": torch.bfloat16}
    q = torch.randn(num_sequences * num_queries, heads, dim, **bf16)
    pages = (num_sequences * num_pages, PAGE_TOKENS, kv_heads, dim)
    keys, values = torch.randn(pages, **bf16), torch.randn(pages, **bf16)
    int32 = {"device": device, "dtype": torch.int32}
    table = torch.arange(num_sequences * num_pages, **int32).view(num_sequences, num_pages)
    starts = torch.arange(num_sequences + 1, **int32) * num_queries
    counts = torch.full((num_sequences,), keys_of_others or num_keys, **int32)
    counts[0] = num_keys
    stretches, scale = Stretches(starts, counts, table), spec.attention_scale

    def ours(tiling: Tiling) -> Call:
        sizes = len(q), num_keys, q.device
        schedule = scheduler_of(tiling, heads, kv_heads, dim, *sizes).schedule(stretches, len(q))
        tiled: dict[str, Any] = {"scale": scale, "tiling": tiling, "schedule": schedule}
        return lambda: attend(q, keys, values, stretches, **tiled)

    calls: dict[str, Call] = {OURS: ours(tiling_of(dim, q.dtype, q.device))}
    if num_queries > 1:
        calls[NARROW] = ours(TILING)
    if keys_of_others is not None:
        return calls
    if importlib.util.find_spec("flashinfer") is not None:
        calls[FLASHINFER] = flashinfer_call(q, keys, values, starts, table, num_keys, scale)
    if num_queries == num_keys:
        calls[FLASH] = flash_call(q, keys, values, num_sequences, scale)
    return calls


def flashinfer_call(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    table: Tensor,
    num_keys: int,
    scale: float,
) -> Call:
    """Return the call of FlashInfer, which is planned once."""
    library: Any = importlib.import_module("flashinfer")
    workspace = torch.zeros(394 << 20, dtype=torch.uint8, device=q.device)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    num_pages = table.shape[1]
    wrapper.plan(
        starts.cpu(),
        torch.arange(len(table) + 1, dtype=torch.int32) * num_pages,
        table.flatten().cpu(),
        torch.full((len(table),), (num_keys - 1) % PAGE_TOKENS + 1, dtype=torch.int32),
        q.shape[1],
        keys.shape[2],
        q.shape[2],
        PAGE_TOKENS,
        causal=True,
        sm_scale=scale,
        q_data_type=q.dtype,
        kv_data_type=keys.dtype,
    )
    return lambda: wrapper.run(q, (keys, values))


def flash_call(q: Tensor, keys: Tensor, values: Tensor, num_sequences: int, scale: float) -> Call:
    """Return torch's call, of whole prompts whose pages lie one after the other."""
    own, theirs, sums = (
        x.reshape(num_sequences, -1, *x.shape[-2:]).transpose(1, 2) for x in (q, keys, values)
    )
    return lambda: F.scaled_dot_product_attention(
        own, theirs, sums, is_causal=True, scale=scale, enable_gqa=True
    )


def parse() -> argparse.Namespace:
    """Return the arguments."""
    options = serving_parser(__doc__, rounds=20, shape="qwen2.5-7b")
    options.add_argument("--calls", type=int, default=20, help="of a round")
    options.add_argument("--most", type=int, default=4096, help="rows, keys and tokens")
    return options.parse_args()


def main() -> None:
    """Run."""
    args = parse()
    report = Report("cuda_kernels", args)
    if lacks_gpu(report, args.device, "kernels on a GPU"):
        report.finish()
        return
    spec = open_model(shape_folder(args.shape), "dummy").spec
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    for num_rows in (rows for rows in ROWS if rows <= args.most):
        for name, calls in products(spec, num_rows, args.device):
            report.add(Quantity(name, "us", measure(calls, args, wait)))
        for name, calls in packed(spec, num_rows, args.device):
            report.add(Quantity(name, "us", measure(calls, args, wait)))
        name = f"gates of 4 of 16 experts, {num_rows} rows"
        report.add(Quantity(name, "us", measure(experts(spec, num_rows, args.device), args, wait)))
        calls = formats(spec, num_rows, args.device)
        report.add(Quantity(f"{name}, by format", "us", measure(calls, args, wait)))
    for num_sequences, num_queries in ((min(64, args.most), 1), (1, args.most)):
        attending = attention(spec, num_sequences, num_queries, args.most, args.device)
        name = f"attention, {num_sequences} sequences of {num_queries} tokens, {args.most} keys"
        alone = {system: [call] for system, call in attending.items()}
        report.add(Quantity(name, "us", measure(alone, args, wait)))
    num, most = min(64, args.most), 8 * args.most
    (call,) = attention(spec, num, 1, most, args.device, max(1, args.most // 16)).values()
    name = f"attention, {num} tokens, one with {most} keys, the others with {args.most // 16}"
    report.add(Quantity(name, "us", measure({OURS: [call]}, args, wait)))
    if args.device == "cuda" and importlib.util.find_spec("flashinfer") is None:
        report.miss("FlashInfer: pip install flashinfer-python")
    report.finish()


if __name__ == "__main__":
    main()
