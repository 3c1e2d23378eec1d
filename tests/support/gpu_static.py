"""What kernels take of a GPU's processors, compiled for all that `gpu_models.py` launches.

Prints a JSON object: of each variant of a kernel, by architecture, bytes of shared memory,
registers of a thread, and bytes of its stack. A hash of the source that Triton reads comes last.
No GPU is needed, and nothing runs.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from gpu_models import GROUPS, MODELS, SEES_AHEAD, format_of
from kernel_compiler import (
    CompiledLaunches,
    Variant,
    compile_variant,
    has_only_wgmma,
    has_rows_of_one_warp,
    is_product,
    source_hash,
    stack_accesses,
    usage_of,
    usages,
)
from triton.runtime.jit import JITFunction

from headrace.engine_proc.worker.cuda import cuda_executor
from headrace.engine_proc.worker.cuda.attention import latent_attention, paged_attention
from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.kernels import linear
from headrace.engine_proc.worker.cuda.kernels.e4m3_rows import E4M3
from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import (
    SMALL_CAPABILITIES,
    TMA_CAPABILITY,
)
from headrace.engine_proc.worker.cuda.kernels.grammar_mask import apply_mask
from headrace.engine_proc.worker.cuda.kernels.gumbel_sampler import Draws, draw
from headrace.engine_proc.worker.cuda.kernels.logit_bias import add_biases
from headrace.engine_proc.worker.cuda.kernels.logprobs import report
from headrace.engine_proc.worker.cuda.kernels.penalties import Penalties, penalize
from headrace.engine_proc.worker.cuda.matrices.dense import DenseMatrix
from headrace.engine_proc.worker.cuda.matrices.fp8 import Fp8Matrix
from headrace.engine_proc.worker.cuda.matrices.int4 import Int4Matrix
from headrace.engine_proc.worker.cuda.matrices.matrices import (
    EMBEDDINGS,
    EXPERTS,
    HEAD_MATRICES,
    WIDE,
    DeviceWeights,
    Matrix,
    fused,
    is_vector,
    laid_out,
)
from headrace.engine_proc.worker.cuda.mixers.gated_norm import CutNorms, GateOrder, gated_norm
from headrace.engine_proc.worker.cuda.mixtures import expert_linear
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import ExpertFormat, ExpertWeights
from headrace.engine_proc.worker.cuda.step_inputs import ImageInputs
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, Mamba2Spec
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.parallel.ipc_kernels import compile_cubin, compiler_version
from headrace.system.all_reduce_policy import WORLDS

Row = list[int | str]  # a usage, and the hash of a source
Table = dict[str, dict[str, Row]]  # by variant, then by architecture

META = torch.device("meta")
UNLOADED: Any = SimpleNamespace(disable=lambda fn, *_, **__: fn)
STEPS = (Sizes(4, 4, 4), Sizes(256, 256, 256), Sizes(2048, 8, 8))  # in each kind of tile
PAGE_TOKENS = 32
WITH_WIDE_TILES = re.compile(" BLOCK_DIM=(16|32|64|128) ")


def experts_of(shape: tuple[int, ...], format: ExpertFormat, has_bias: bool) -> ExpertWeights:
    """Return matrices of experts, one after the other, without numbers."""
    num_rows, num_terms = shape
    is_dense, is_packed = format == ExpertFormat.DENSE, format >= ExpertFormat.INT4
    dtype = {ExpertFormat.DENSE: torch.bfloat16, ExpertFormat.FP8: E4M3}.get(format, torch.uint8)
    size = GROUPS.get(format, num_terms)
    groups = torch.empty(num_rows, num_terms // size, dtype=torch.uint8, device=META)
    return ExpertWeights(
        torch.empty(num_rows, num_terms // (1 + is_packed), dtype=dtype, device=META),
        torch.empty(num_rows, dtype=torch.bfloat16, device=META) if has_bias else None,
        format,
        None if is_dense else groups if format == ExpertFormat.MXFP4 else groups.float(),
        groups if format == ExpertFormat.INT4 else None,
        1 if is_dense else size,
    )


def matrix_of(shape: tuple[int, ...], format: ExpertFormat, has_bias: bool) -> Matrix:
    """Return a matrix in a format, without numbers."""
    parts = experts_of(shape, format, has_bias)
    if format == ExpertFormat.FP8:
        assert parts.scales is not None
        return Fp8Matrix(parts.numbers, parts.scales, parts.group_size, parts.bias)
    if format == ExpertFormat.INT4:
        assert parts.scales is not None and parts.zeros is not None
        return Int4Matrix(
            parts.numbers, parts.zeros, parts.scales, parts.group_size, bias=parts.bias
        )
    return DenseMatrix(parts.numbers, parts.bias)


def weights_of(spec: DecoderSpec, format: ExpertFormat) -> DeviceWeights:
    """Return a decoder's weights in bf16, experts in a format, without numbers.

    Where there are no experts, layers are in that format.
    """
    shapes = weight_shapes(spec)
    has_experts = any(layer.mixture is not None for layer in spec.layers)
    matrices: dict[str, Matrix] = {}
    tensors, wide, experts = {}, {}, {}
    sources = fused(spec)
    for name, parts in sources.items():
        num_rows = sum(shapes[part][0] for part in parts)
        rest = shapes[parts[0]][1:]
        if name in EMBEDDINGS or is_vector(name, shapes[parts[0]]):
            dtype = torch.bfloat16 if name in EMBEDDINGS else torch.float32
            tensor = torch.empty(num_rows, *rest, dtype=dtype, device=META)
            tensors[name] = tensor if rest else laid_out(spec, name, tensor)
            continue
        has_bias = (bias := f"{parts[0]}.bias") in shapes and bias not in sources
        if EXPERTS in name or name.endswith(HEAD_MATRICES):
            own = format if EXPERTS in name else ExpertFormat.DENSE
            experts[name] = experts_of((num_rows, *rest), own, has_bias)
            continue
        if name.endswith(WIDE):
            weight = torch.empty(num_rows, *rest, dtype=torch.bfloat16, device=META)
            wide[name] = DenseMatrix(weight, weight[:, 0].contiguous() if has_bias else None)
            continue
        own = ExpertFormat.DENSE if has_experts or name == "head" else format
        matrices[name] = matrix_of((num_rows, *rest), own, has_bias)
    if spec.tied_head:
        matrices["head"] = DenseMatrix(tensors["embed"])
    return DeviceWeights(matrices, tensors, wide, experts)


def launch_decoder(spec: DecoderSpec, format: ExpertFormat, sees_ahead: bool) -> None:
    """Launch what steps of all kinds of a decoder launch."""
    cuda_executor.load_weights = lambda spec, *_, **__: weights_of(spec, format)
    executor = cuda_executor.CudaExecutor(
        spec, {}, num_pages=1, page_tokens=PAGE_TOKENS, device=META, largest=STEPS[-1]
    )
    for sizes in STEPS:
        executor.compute(sizes)
        if sees_ahead:
            last_seen = torch.empty(sizes.num_tokens, dtype=torch.int32, device=META)
            executor.compute(sizes, ImageInputs(None, last_seen))


def launch_cut_norms(spec: DecoderSpec) -> None:
    """Launch norms of Mamba-2 that two workers share: what the first of them does."""
    mixers = (layer.mixer for layer in spec.layers)
    for mamba2 in (own for own in mixers if isinstance(own, Mamba2Spec) and own.norm_size):
        num, num_groups = mamba2.norm_size // 2, mamba2.inner_size // mamba2.norm_size
        x = torch.empty(STEPS[0].num_tokens, num, device=META)
        cut = CutNorms(0, num_groups, lambda squares: squares)
        options: dict[str, Any] = {"group_size": mamba2.norm_size, "eps": spec.norm_eps}
        gated_norm(x, x.bfloat16(), x[0], GateOrder.GATE_FIRST, **options, cut=cut)


def launch_sampler(vocab_size: int) -> None:
    """Launch what chooses tokens of a vocabulary."""
    num_rows = STEPS[0].num_rows
    logits = torch.empty(num_rows, vocab_size, device=META)
    whole = torch.empty(num_rows, dtype=torch.int64, device=META)
    numbers, real = whole.int(), whole.float()
    columns = dict.fromkeys((field.name for field in fields(Draws)), real)
    draw(logits, Draws(**columns | {"seed": whole, "position": whole, "top_k": numbers}))
    report(logits, numbers, numbers, 20)
    masks = torch.empty(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=META)
    apply_mask(logits, numbers, masks)
    add_biases(logits, numbers, numbers, numbers, real)
    penalize(logits, Penalties(*[numbers] * 4, *[real] * 3), numbers)


def pretend(arch: int) -> None:
    """Have code that asks for a GPU's architecture find this one, in this process.

    Torch would load its compiler, at a second of a core, to leave alone what it does on meta.
    """
    vars(torch)["_dynamo"] = sys.modules["torch._dynamo"] = UNLOADED
    is_new = arch >= 10 * TMA_CAPABILITY[0]
    for module in (linear, latent_attention, expert_linear):
        vars(module)["has_tma"] = lambda device: is_new
    paged_attention.is_hopper = lambda device: arch // 10 == TMA_CAPABILITY[0]
    for module in (paged_attention, latent_attention):
        vars(module)["has_small_memory"] = lambda device: divmod(arch, 10) in SMALL_CAPABILITIES


def variants(models: str, arch: int) -> list[Variant]:
    """Return all variants of kernels of the models whose names begin with a pattern.

    Architectures before sm_89 have no e4m3: variants with it are left out.
    """
    pretend(arch)
    found: list[Variant] = []
    assert "run" in vars(JITFunction)  # what is replaced now
    JITFunction.run = CompiledLaunches(found.append).stand_in()  # type: ignore[method-assign]
    chosen = {name: spec for name, spec in MODELS.items() if re.match(models, name)}
    for name, spec in chosen.items():
        launch_decoder(spec, format_of(name), name in SEES_AHEAD)
        launch_cut_norms(spec)
    for vocab_size in {spec.vocab_size for spec in chosen.values()}:
        launch_sampler(vocab_size)
    return [variant for variant in found if arch >= 89 or "*fp8e4nv" not in variant.name]


def without_old(table: Table, names: set[str], arch: int) -> Table:
    """Return a table without an architecture's variants that nothing launches any more."""
    kept = {
        name: {key: usage for key, usage in row.items() if key != str(arch) or name in names}
        for name, row in table.items()
    }
    return {name: row for name, row in kept.items() if row}


def is_stale(variant: Variant, table: Table, arch: int) -> bool:
    """Whether a table lacks a variant, or has it of another source."""
    row = table.get(variant.name, {}).get(str(arch))
    return row is None or row[-1] != source_hash(variant, arch)


def compile_all(chosen: list[Variant], arch: int) -> Iterator[tuple[str, Row]]:
    """Compile variants, and yield the row of each."""
    for done, variant in enumerate(chosen):
        print(f"sm_{arch}: {done} of {len(chosen)}: {variant.name}", file=sys.stderr)
        compiled = compile_variant(variant, arch)
        is_hopper = arch // 10 == TMA_CAPABILITY[0]
        if "attention_kernel" in variant.name and is_hopper:
            check_attention(variant.name, compiled)
        if is_product(variant) and is_hopper:
            assert has_only_wgmma(compiled), f"{variant.name}: other instructions have other bits"
        yield variant.name, [*usage_of(compiled), source_hash(variant, arch)]


def check_attention(name: str, compiled: Any) -> None:
    """Check what attention on a Hopper relies on."""
    assert stack_accesses(compiled.asm["cubin"]) == 0, f"{name}: loops over keys use the stack"
    if WITH_WIDE_TILES.search(name) and not name.startswith("latent"):
        assert has_rows_of_one_warp(compiled), f"{name}: tiles of other rows have other bits"


def of_nvrtc(architectures: list[int]) -> Table:
    """Return what the kernels of the all-reduce take."""
    table: Table = {}
    for arch, world in itertools.product(architectures, WORLDS):
        for name, usage in usages(compile_cubin(f"sm_{arch}", world)).items():
            table.setdefault(f"{name} WORLD={world}", {})[str(arch)] = list(usage)
    return table


def written(tables: dict[str, Table]) -> str:
    """Return tables as JSON, a line for each variant."""
    parts = []
    for compiler, table in sorted(tables.items()):
        lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table.items())]
        parts.append(f" {json.dumps(compiler)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(path: Path, tables: dict[str, Table]) -> None:
    """Write tables to a file, which is whole at any moment."""
    new = path.with_suffix(".new")
    new.write_text(written(tables))
    new.replace(path)


def main() -> None:
    """Print the tables, or bring a file up to date row by row."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("architectures", help="as 80,90")
    options.add_argument("--models", default="", help="a pattern that their names begin with")
    options.add_argument(
        "--pattern", default="", help="of names of Triton's kernels, and no others"
    )
    options.add_argument(
        "--write", type=Path, help="a file of tables, those of other compilers stay"
    )
    options.add_argument(
        "--missing", action="store_true", help="compile no row that the file has of this source"
    )
    args = options.parse_args()
    numbers = [int(arch) for arch in args.architectures.split(",")]
    tables: dict[str, Table] = {} if args.write is None else json.loads(args.write.read_text())
    compiler = f"Triton {triton.__version__}"
    table = tables.get(compiler, {})
    for arch in numbers:
        found = variants(args.models, arch)
        if not args.models and not args.pattern:
            table = without_old(table, {variant.name for variant in found}, arch)
        tables[compiler] = table
        chosen = [variant for variant in found if re.search(args.pattern, variant.name)]
        if args.missing:
            chosen = [variant for variant in chosen if is_stale(variant, table, arch)]
        for name, row in compile_all(chosen, arch):
            table.setdefault(name, {})[str(arch)] = row
            if args.write is not None:
                write(args.write, tables)
    if not args.pattern and not args.missing:
        tables[f"NVRTC {compiler_version()}"] = of_nvrtc(numbers)
    if args.write is None:
        print(written(tables), end="")
    else:
        write(args.write, tables)


if __name__ == "__main__":
    main()
