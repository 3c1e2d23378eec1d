"""Measure kernels of layers with states, and attention over latents, on a GPU, beside floors.

Method: the convolution and the recurrence of a layer of LFM2, Qwen3-Next, Granite 4 and Jamba.
        Numbers are random; a step has a token of each of 1 and 64 sequences, or a prompt. "floor"
        is what reading and writing states once would take; a single sequence's may stay in a cache.
        Then attention over DeepSeek V3's latents, as one of 8 GPUs has it. 64 tokens have 4,096
        keys each, and their floor is reading all latents once; then comes a prompt. Rounds are
        those of `cuda_kernels.py`.
Run:    python bench/cuda_mixers.py --rounds 10
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from cuda_kernels import OURS, PAGE_TOKENS, measure
from headrace.engine_proc.worker.cuda.attention.latent_attention import (
    attend_latents,
    latent_scheduler,
    latent_tiling,
)
from headrace.engine_proc.worker.cuda.attention.tile_schedule import Stretches
from headrace.engine_proc.worker.cuda.mixers.causal_conv import causal_conv
from headrace.engine_proc.worker.cuda.mixers.delta_rule import DeltaGates
from headrace.engine_proc.worker.cuda.mixers.gated_delta_rule import apply_gated_delta_rule
from headrace.engine_proc.worker.cuda.mixers.ssd import scan_ssm
from headrace.engine_proc.worker.cuda.mixers.ssm_scan import SsmHeads, scan_channels
from headrace.engine_proc.worker.cuda.mixers.state_moves import StateMoves
from headrace.engine_proc.worker.cuda.mixers.token_blocks import BLOCK_TOKENS, slot_numbers
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MambaSpec,
    Mixer,
    ShortConvSpec,
)
from support.report import Quantity, Report, parser
from support.serving import lacks_gpu

MIXERS: dict[str, Mixer] = {
    "LFM2 1.2B": ShortConvSpec(channels=2048, kernel_size=3),
    "Qwen3-Next 80B": GatedDeltaNetSpec(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, kernel_size=4
    ),
    "Granite 4 small": Mamba2Spec(
        num_heads=128, head_dim=64, state_size=128, num_groups=1, kernel_size=4, norm_size=8192
    ),
    "Jamba mini": MambaSpec(channels=8192, state_size=16, rank=256, kernel_size=4, norms=True),
}
TINY: dict[str, Mixer] = {  # shows that the script works
    "LFM2 1.2B": ShortConvSpec(channels=16, kernel_size=3),
    "Qwen3-Next 80B": GatedDeltaNetSpec(
        num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=8, kernel_size=4
    ),
    "Granite 4 small": Mamba2Spec(
        num_heads=2, head_dim=8, state_size=8, num_groups=1, kernel_size=4, norm_size=16
    ),
    "Jamba mini": MambaSpec(channels=32, state_size=4, rank=4, kernel_size=4, norms=True),
}
LATENT_HEADS = 16
LATENTS = LatentAttentionSpec(query_rank=1536, rank=512, nope_dim=128, rope_dim=64, value_dim=128)
TINY_LATENTS = LatentAttentionSpec(query_rank=8, rank=16, nope_dim=8, rope_dim=8, value_dim=8)
FLOOR = "floor"
Kernel = Callable[[Tensor, StateMoves], object]  # takes states


def moves_of(num_sequences: int, num_tokens: int, device: str) -> StateMoves:
    """Return the moves of a step of so many tokens of each sequence, which have states before.

    Its sequences are in the middle of a block of tokens.
    """
    int32 = {"device": device, "dtype": torch.int32}
    sequence = torch.arange(num_sequences, **int32)
    starts = torch.arange(num_sequences + 1, **int32) * num_tokens
    slots = torch.full((num_sequences + 1, 3), -1, **int32)
    slots[:-1] = torch.stack([sequence, num_sequences + sequence, starts[1:]], 1)
    whole = torch.cat([starts, starts[-1:]])  # padding, of which there is none
    positions = torch.arange(num_tokens, **int32).repeat(num_sequences) + BLOCK_TOKENS // 2
    return StateMoves(sequence.repeat_interleave(num_tokens), whole, slots, positions)


def conv_of(mixer: Mixer, num_rows: int, device: str) -> Kernel:
    """Return the convolution of a layer."""
    is_gated = isinstance(mixer, ShortConvSpec)
    match mixer:
        case ShortConvSpec() | MambaSpec():
            width = mixer.channels
        case GatedDeltaNetSpec():
            width = 2 * mixer.key_width + mixer.value_width
        case Mamba2Spec():
            width = mixer.inner_size + 2 * mixer.group_numbers
        case _:
            raise AssertionError(f"{mixer} has no convolution")
    x = torch.randn(num_rows, width * (3 if is_gated else 1), device=device).bfloat16()
    weight = torch.randn(mixer.kernel_size, width, device=device)
    return lambda states, moves: causal_conv(x, weight, None, states, moves, is_gated=is_gated)


def recurrence_of(mixer: Mixer, num_rows: int, device: str) -> Kernel | None:
    """Return the recurrence of a layer, if it has one."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    match mixer:
        case GatedDeltaNetSpec():
            heads = mixer.num_value_heads
            rows = numbers(num_rows, 2 * mixer.key_width + mixer.value_width).bfloat16()
            gates = DeltaGates(*numbers(2, num_rows, heads), numbers(heads), -numbers(heads).abs())
            return lambda states, moves: apply_gated_delta_rule(mixer, rows, gates, states, moves)
        case Mamba2Spec():
            rows = numbers(num_rows, mixer.inner_size + 2 * mixer.group_numbers).bfloat16()
            dt = numbers(num_rows, mixer.num_heads).bfloat16()
            bias, decay, skip = numbers(3, mixer.num_heads)
            learned = SsmHeads(bias, -decay.abs(), skip)
            return lambda states, moves: scan_ssm(mixer, rows, dt, learned, states, moves)
        case MambaSpec():
            rows = numbers(num_rows, mixer.channels).bfloat16()
            bc, dt = numbers(num_rows, 2 * mixer.state_size), numbers(num_rows, mixer.channels)
            decay = -numbers(mixer.channels * mixer.state_size).abs()
            learned = SsmHeads(numbers(mixer.channels), decay, numbers(mixer.channels))
            return lambda states, moves: scan_channels(mixer, rows, bc, dt, learned, states, moves)
    return None


def kernels(
    mixer: Mixer, num_sequences: int, num_tokens: int, device: str
) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yield a layer's kernels: what each is, a call of it, and the bytes of states it moves."""
    num_rows = num_sequences * num_tokens
    moves = moves_of(num_sequences, num_tokens, device)
    numbers = slot_numbers(mixer, torch.bfloat16)
    states = torch.randn(2 * num_sequences, numbers, device=device)
    conv, recurrence = (make(mixer, num_rows, device) for make in (conv_of, recurrence_of))
    window = numbers if recurrence is None else window_of(mixer)
    parts = {"convolution": (conv, states[:, :window])}
    parts["recurrence"] = recurrence, states[:, window:]
    for name, (kernel, own) in parts.items():
        if kernel is not None:
            yield name, partial(kernel, own, moves), own.nbytes


def window_of(mixer: Mixer) -> int:
    """Return how many numbers of a state are what is convolved."""
    match mixer:
        case GatedDeltaNetSpec():
            return mixer.state_numbers - mixer.key_dim * mixer.value_width
        case Mamba2Spec():
            return mixer.state_numbers - mixer.inner_size * mixer.state_size
        case MambaSpec():
            return mixer.state_numbers - mixer.channels * mixer.state_size
    return mixer.state_numbers


def latents(
    spec: LatentAttentionSpec, num_sequences: int, num_tokens: int, num_keys: int, device: str
) -> tuple[Callable[[], object], int]:
    """Return a call that attends over latents, and the bytes of all latents."""
    num_pages = -(-num_keys // PAGE_TOKENS)
    bf16 = {"device": device, "dtype": torch.bfloat16}
    int32 = {"device": device, "dtype": torch.int32}
    num_rows = num_sequences * num_tokens
    q = torch.randn(num_rows, LATENT_HEADS, spec.rank, **bf16)
    turned = torch.randn(num_rows, LATENT_HEADS, spec.rope_dim, **bf16)
    pages = torch.randn(num_sequences * num_pages, PAGE_TOKENS, 1, spec.latent_dim, **bf16)
    table = torch.arange(num_sequences * num_pages, **int32).view(num_sequences, num_pages)
    starts = torch.arange(num_sequences + 1, **int32) * num_tokens
    stretches = Stretches(starts, torch.full((num_sequences,), num_keys, **int32), table)
    scheduler = latent_scheduler(
        latent_tiling(q.device), LATENT_HEADS, spec.rank, num_rows, num_keys, q.device
    )
    schedule = scheduler.schedule(stretches, num_rows)
    call = partial(attend_latents, q, turned, pages, stretches, scale=0.1, schedule=schedule)
    return call, num_sequences * num_keys * spec.latent_dim * pages.itemsize


def parse() -> argparse.Namespace:
    """Return the arguments."""
    options = parser(__doc__, rounds=10)
    options.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu has tiny layers: a trial"
    )
    options.add_argument("--calls", type=int, default=10, help="of a round")
    options.add_argument("--most", type=int, default=4096, help="keys, and tokens of a prompt")
    options.add_argument("--tb-per-s", type=float, default=4.3, help="of the GPU's memory, read")
    return options.parse_args()


def main() -> None:
    """Run."""
    args = parse()
    report = Report("cuda_mixers", args)
    if lacks_gpu(report, args.device, "layers with states on a GPU"):
        report.finish()
        return
    is_gpu = args.device == "cuda"
    wait = torch.cuda.synchronize if is_gpu else lambda: None

    def add(name: str, call: Callable[[], object], floor_bytes: int) -> None:
        samples = measure({OURS: [call]}, args, wait)
        if floor_bytes:
            samples[FLOOR] = [floor_bytes / args.tb_per_s / 1e6] * args.rounds
        report.add(Quantity(name, "us", samples))

    many = min(64, args.most)
    for model, mixer in (MIXERS if is_gpu else TINY).items():
        for num_sequences, num_tokens in ((1, 1), (many, 1), (1, args.most)):
            for kernel, call, state_bytes in kernels(mixer, num_sequences, num_tokens, args.device):
                name = f"{model}, {kernel}, {num_sequences} of {num_tokens} tokens"
                add(name, call, state_bytes if num_tokens == 1 else 0)
    for num_sequences, num_tokens in ((many, 1), (1, args.most)):
        call, latent_bytes = latents(
            LATENTS if is_gpu else TINY_LATENTS, num_sequences, num_tokens, args.most, args.device
        )
        name = f"latents, {num_sequences} of {num_tokens} tokens, {args.most} keys"
        add(name, call, latent_bytes if num_tokens == 1 else 0)
    report.finish()


if __name__ == "__main__":
    main()
