"""Compiles for a GPU what a step of a decoder launches. No GPU is needed, and nothing runs.

In: an architecture, as 90, and how many variants of each kernel are compiled. Of others Triton
reads the source. With 0 it is one of those kernels that `cuda_static.json` lacks: of others
`test_static.py` asks whether it has them of this source. Out: a line for each variant.
"""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import triton
from kernel_compiler import (
    CompiledLaunches,
    Variant,
    compile_variant,
    has_only_wgmma,
    is_product,
    source_hash,
)
from quantized_experts import FORMATS
from random_decoders import NUM_PAGES, SPEC, batch, random_weights, with_latents
from triton.runtime.jit import JITFunction

from headrace.config.config import MAX_LORA_RANK
from headrace.engine_proc.worker.cuda import cuda_executor
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.kernels.e4m3_rows import E4M3
from headrace.engine_proc.worker.cuda.kernels.gated_activation import act_mul
from headrace.engine_proc.worker.cuda.kernels.grammar_mask import apply_mask
from headrace.engine_proc.worker.cuda.kernels.gumbel_sampler import Draws, draw
from headrace.engine_proc.worker.cuda.kernels.linear import ENOUGH_PROGRAMS, linear
from headrace.engine_proc.worker.cuda.kernels.logit_bias import add_biases
from headrace.engine_proc.worker.cuda.kernels.logprobs import report
from headrace.engine_proc.worker.cuda.kernels.low_rank import expand, shrink
from headrace.engine_proc.worker.cuda.kernels.norm import square_sums
from headrace.engine_proc.worker.cuda.kernels.penalties import Penalties, penalize
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import new_turns
from headrace.engine_proc.worker.cuda.matrices.fp8 import Fp8Matrix
from headrace.engine_proc.worker.cuda.matrices.int4 import Int4Matrix
from headrace.engine_proc.worker.cuda.matrices.matrices import load_experts
from headrace.engine_proc.worker.cuda.mixtures.expert_activation import ExpertActivation
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import activated_expert_linear
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import sort_by_expert
from headrace.engine_proc.worker.cuda.mixtures.router import choose_experts
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    LatentAttentionSpec,
    LayerSpec,
    MixtureSpec,
    QKNorm,
    RouterScore,
)

DECODER = dataclasses.replace(  # of sizes that make few variants
    SPEC,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    layers=(LayerSpec(window=20),),
    qk_norm=QKNorm.PER_HEAD,
    value_norm=True,
    attention_softcap=2.0,
    attention_sinks=True,
)
MIXTURE = MixtureSpec(
    num_experts=4,
    experts_per_token=4,
    intermediate_size=32,
    shared_intermediate_size=32,
    shared_gate=True,
)
WITH_MIXTURE = dataclasses.replace(DECODER, layers=(LayerSpec(window=20, mixture=MIXTURE),))

TABLE = Path(__file__).parents[2] / "bench" / "results" / "cuda_static.json"
INT4_GROUP = 32
SHARED_BYTES = 232448  # that a program has on Hopper
LATENT = LatentAttentionSpec(query_rank=32, rank=64, nope_dim=32, rope_dim=16, value_dim=32)
WITH_LATENTS = with_latents(dataclasses.replace(DECODER, layers=(LayerSpec(),)), LATENT)


def compile_new(variant: Variant) -> None:
    """Compile a variant and look at what has come of it, or have its source read."""
    kernel = variant.name.split()[0]
    print(kernel)
    counts[kernel] += 1
    if counts[kernel] > (MOST or kernel not in IN_TABLE):
        source_hash(variant, ARCH)
        return
    compiled = compile_variant(variant, ARCH)
    assert compiled.metadata.shared <= SHARED_BYTES, variant.name
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    if is_product(variant):
        assert has_only_wgmma(compiled), variant.name


if __name__ == "__main__":
    ARCH, MOST = map(int, sys.argv[1:])
    counts: Counter[str] = Counter()
    table = json.loads(TABLE.read_text()).get(f"Triton {triton.__version__}", {})
    IN_TABLE = {variant.split()[0] for variant in table}
    assert "run" in vars(JITFunction)  # what is replaced now
    launches = CompiledLaunches(compile_new)
    JITFunction.run = launches.stand_in()  # type: ignore[method-assign]
    cuda_executor.INTERPRETED = triton.language.constexpr(True)  # tensors are on the CPU
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, kv_dtype in ((bf16, bf16), (fp32, fp32), (bf16, E4M3)):
        executor = cuda_executor.CudaExecutor(
            DECODER,
            random_weights(DECODER),
            num_pages=NUM_PAGES,
            page_tokens=16,
            device="cpu",
            dtype=dtype,
            kv_dtype=kv_dtype,
            tiling=Tiling(split_keys=64),
        )
        for length in (80, 20):  # in larger tiles, and in the smallest
            executor.forward(batch([(0, 0, length), (1, 0, 2)]))
    mixture = cuda_executor.CudaExecutor(
        WITH_MIXTURE,
        random_weights(WITH_MIXTURE),
        num_pages=NUM_PAGES,
        page_tokens=16,
        device="cpu",
        tiling=Tiling(split_keys=64),
    )
    mixture.forward(batch([(0, 0, 20), (1, 0, 2)]))
    cuda_executor.CudaExecutor(
        WITH_LATENTS,
        random_weights(WITH_LATENTS),
        num_pages=NUM_PAGES,
        page_tokens=16,
        device="cpu",
    ).forward(batch([(0, 0, 20), (1, 0, 2)]))
    num_variants = len(launches.names)
    for length in (1, 7, 16):
        executor.forward(batch([(0, 0, length)]))
    assert len(launches.names) == num_variants, "steps of other sizes would wait for a compiler"
    codes = torch.zeros(64, 128, dtype=torch.uint8)
    fp8_weight = torch.zeros(64, 256).to(E4M3)
    rows = torch.zeros(3, 256, dtype=torch.bfloat16)
    whole_rows = torch.zeros(3, dtype=torch.int64)
    Fp8Matrix(fp8_weight, torch.ones(64, 2), 128).apply(rows)
    for num_rows in (3, 130):
        many = torch.zeros(num_rows, 512, dtype=torch.bfloat16)  # in parts, without TMA and with
        turns = new_turns(ENOUGH_PROGRAMS, many.device)
        act_mul(linear(many, many[:64].contiguous(), turns=turns), Activation.SILU)
    sparse = dataclasses.replace(MIXTURE, score=RouterScore.SPARSEMIXER, normalized=False)
    choose_experts(sparse, rows.float(), None, whole_rows)
    for name in ("fp8 by block", "int4", "mxfp4"):
        part = FORMATS[name]((64, 256))
        experts = load_experts([part] * 4, None, rows.device, rows.dtype, "none")
        choice = choose_experts(MIXTURE, rows.float(), None, whole_rows)
        tiles = sort_by_expert(MIXTURE, choice, rows.dtype)
        activated_expert_linear(rows, experts, tiles, ExpertActivation(Activation.SILU))
    zeros = torch.zeros(64, 256 // INT4_GROUP, dtype=torch.uint8)
    matrix = Int4Matrix(codes, zeros, zeros.float(), INT4_GROUP, bias=rows[0, :64])
    matrix.apply(rows)
    matrix.decoded(torch.bfloat16)
    slots, gains = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 64)
    for factor in (torch.zeros(2, 8, 64, dtype=bf16), torch.zeros(2, MAX_LORA_RANK, 64)):
        x = torch.zeros(3, 64, dtype=factor.dtype)
        b = factor.transpose(1, 2).contiguous()
        expand(torch.zeros_like(x), shrink(x, factor, slots), b, gains, None, slots)
    logits = torch.zeros(3, 100)
    apply_mask(logits, torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32))
    starts = torch.tensor([0, 0, 1], dtype=torch.int32)
    add_biases(logits, starts, starts, starts, torch.ones(3))
    penalize(logits, Penalties(*[starts] * 4, *[torch.ones(3)] * 3), starts)
    report(logits, starts, starts, 1)
    square_sums(torch.zeros(3, 32, dtype=torch.bfloat16))
    whole, real = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    columns = dict.fromkeys((field.name for field in dataclasses.fields(Draws)), real)
    columns |= {"seed": whole, "position": whole, "top_k": torch.from_numpy(np.int32([3, 0, 1]))}
    draw(logits, Draws(**columns))
