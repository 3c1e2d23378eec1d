"""The all-reduce of GPUs, whole: exchange, graphs and kernels.

GPUs are made of CPU threads, and where there is a real one, ranks are streams of it, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpu_streams import StreamGpu, need_gpu
from gpu_threads import ThreadGpu
from ipc_ranks import (
    MAX_BYTES,
    TRIAL,
    Rank,
    all_equal,
    capture_sums,
    ranks_do,
    replay_and_compare,
    summed,
    three_inputs,
    values,
)
from torch import Tensor

from headrace.engine_proc.worker.parallel import ipc_all_reduce
from headrace.engine_proc.worker.parallel.graph_inputs import Recapture
from headrace.engine_proc.worker.parallel.ipc_group import Trial
from headrace.system.all_reduce_policy import Algorithm

pytestmark = pytest.mark.usefixtures("in_place")
EPOCHS = [1, 0xFFFFFFE8]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DOUBLE_BUFFER, EXIT = 2, 4  # Part, of csrc/collectives/all_reduce.cuh


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("first_epoch", EPOCHS)
def test_all_ranks_get_the_sum_to_the_bit(
    make_gpu: Callable[..., Any], world: int, first_epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ipc_all_reduce.__dict__, "choose", half_by_two_shot)
    sizes = [8, 16, 136, 1000, 5008]

    def body(rank: Rank) -> list[Tensor]:
        assert rank.all_reduce.enabled, rank.all_reduce.why_not
        results = [
            rank.all_reduce.all_reduce(rank.values(size, dtype, seed))
            for seed, size in enumerate(sizes)
            for dtype in DTYPES
        ]
        rank.gpu.synchronize()
        rank.all_reduce.check()
        if isinstance(rank.gpu, ThreadGpu):
            assert {"one_shot_bfloat16", "two_shot_float16"} <= set(rank.gpu.num_launched)
        return results

    trial = Trial(TRIAL.num_sums, TRIAL.limit_ns, first_epoch)
    results = ranks_do(world, body, make_gpu, trial=trial)
    wanted = [summed(world, n, dtype, seed) for seed, n in enumerate(sizes) for dtype in DTYPES]
    for index, sum in enumerate(wanted):
        all_equal([theirs[index] for theirs in results], sum)


real_choose = ipc_all_reduce.choose


def half_by_two_shot(num_bytes: int, *arguments: Any) -> Any:
    """Choose two-shot for some small sizes, too."""
    choice = real_choose(num_bytes, *arguments)
    if choice.algorithm is Algorithm.ONE_SHOT and num_bytes // 16 % 2:
        return type(choice)(Algorithm.TWO_SHOT, choice.registered, choice.reason)
    return choice


def test_what_is_not_for_our_kernels_goes_to_nccl() -> None:
    def body(rank: Rank) -> None:
        ours, x = rank.all_reduce, torch.ones
        for other in (x(8, dtype=torch.float64), x(0)):
            assert ours.choice(other).algorithm is Algorithm.NCCL
            assert ours.all_reduce(other) is other
        ours.all_gather(x(5), x(2, 5))
        ours.broadcast(x(8))
        assert rank.nccl.calls == ["all_reduce"] * 2 + ["all_gather", "broadcast"]
        assert rank.nccl.is_trusted

    ranks_do(2, body)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [2, 4])
def test_sums_of_all_sizes_have_the_bits_of_small_ones(world: int, dtype: torch.dtype) -> None:
    """Those of NCCL depend on the size, and so on what else is in the batch."""
    num_lanes = 2 * MAX_BYTES // dtype.itemsize + 45  # two slices, and a bit that is no vector

    def body(rank: Rank) -> tuple[Tensor, Tensor]:
        x = rank.values(num_lanes, dtype)
        large = rank.all_reduce.all_reduce(x)
        part = rank.all_reduce.all_reduce(x[-77:].clone())
        rank.gpu.synchronize()
        rank.all_reduce.check()
        assert not {"all_reduce", "all_gather"} & set(rank.nccl.calls)
        return large, part

    results = ranks_do(world, body)
    wanted = summed(world, num_lanes, dtype)
    all_equal([large for large, _ in results], wanted)
    all_equal([part for _, part in results], wanted[-77:])


def test_ranks_gather_what_each_has(make_gpu: Callable[..., Any]) -> None:
    """In slices, in a graph and outside of one."""

    def body(rank: Rank) -> None:
        ours, gpu = rank.all_reduce, rank.gpu
        x = gpu.tensor(torch.zeros(4, 24, dtype=torch.bfloat16))
        out = rank.place(torch.empty(rank.world, 4, 24, dtype=torch.bfloat16))
        with ours.capture():
            graph, _ = gpu.capture(lambda: ours.all_gather(x, out))
        large = rank.values(MAX_BYTES // 2, torch.float32)
        all_large = rank.place(torch.empty(rank.world, *large.shape))
        for seed in range(3):
            x.copy_(rank.values(96, x.dtype, seed).view(x.shape))
            gpu.replay(graph)
            ours.all_gather(large, all_large)
            gpu.synchronize()
            for other in range(rank.world):
                assert torch.equal(out[other].cpu().view(-1), values(other, 96, x.dtype, seed))
                wanted = values(other, MAX_BYTES // 2, torch.float32, 0)
                assert torch.equal(all_large[other].cpu(), wanted)
        ours.check()
        assert not {"all_reduce", "all_gather"} & set(rank.nccl.calls)

    ranks_do(4, body, make_gpu)


def test_a_rank_whose_tensor_is_misaligned_or_strided_copies_it() -> None:
    def body(rank: Rank) -> tuple[Tensor, Tensor]:
        odd = torch.cat([torch.zeros(1), rank.values(64, torch.float32)])[1:]
        strided = rank.values(64, torch.float32).view(8, 8)
        if rank.rank == 1:
            assert odd.data_ptr() % 16
        else:
            odd = odd.clone()
            strided = strided.t().contiguous().t()
        results = rank.all_reduce.all_reduce(odd), rank.all_reduce.all_reduce(strided)
        rank.gpu.synchronize()
        assert not {"all_reduce", "all_gather"} & set(rank.nccl.calls)
        return results

    results = ranks_do(2, body)
    wanted = summed(2, 64, torch.float32)
    all_equal([odd for odd, _ in results], wanted)
    all_equal([strided for _, strided in results], wanted.view(8, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one_plus", [False, True])
def test_fused_is_the_sum_then_the_residual_then_the_norm(
    make_gpu: Callable[..., Any], dtype: torch.dtype, one_plus: bool
) -> None:
    shape, eps = (5, 96), 1e-5
    residual, weight = values(9, 480, dtype, 1).view(shape), values(9, 96, dtype, 2)

    def body(rank: Rank) -> tuple[Tensor, Tensor]:
        x = rank.values(480, dtype).view(shape)
        assert rank.all_reduce.fuses(x)
        given = rank.place(residual), rank.place(weight)
        out, after = rank.all_reduce.all_reduce_add_rmsnorm(x, *given, eps, one_plus)
        rank.gpu.synchronize()
        rank.all_reduce.check()
        return out.cpu(), after.cpu()

    results = ranks_do(4, body, make_gpu)
    after = residual + summed(4, 480, dtype).view(shape)
    all_equal([after for _, after in results], after)
    y = after.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = (y * (weight.float() + one_plus)).to(dtype)
    for out, _ in results:
        assert torch.equal(out, results[0][0])
        torch.testing.assert_close(out, y)  # its sum of squares has an order of its own


def test_rows_of_odd_bytes_and_pairs_of_gpus_are_not_fused() -> None:
    def body(rank: Rank) -> list[bool]:
        shapes = [(4, 96), (4, 98)]
        return [rank.all_reduce.fuses(torch.ones(shape)) for shape in shapes]

    assert ranks_do(4, body) == [[True, False]] * 4
    assert ranks_do(2, body) == [[False, False]] * 2


# --- graphs ---


@pytest.mark.parametrize("world", [2, 4, 8])
def test_graphs_are_replayed_with_changing_inputs(
    make_gpu: Callable[..., Any], world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ipc_all_reduce.__dict__, "choose", half_by_two_shot)
    num_times = 1000 if make_gpu is StreamGpu else 4
    if world == 8 and make_gpu is ThreadGpu:
        pytest.skip("128 threads, that show what 64 do")

    def body(rank: Rank) -> None:
        inputs = three_inputs(rank)
        graph, outs = capture_sums(rank, inputs)
        replay_and_compare(rank, graph, inputs, outs, num_times)
        rank.all_reduce.check()

    ranks_do(world, body, make_gpu)


@pytest.mark.parametrize("exports", [True, False])
def test_graphs_read_their_inputs_where_they_lie_or_copy_them(exports: bool) -> None:
    def body(rank: Rank) -> None:
        gpu, inputs = rank.gpu, three_inputs(rank)
        if not exports:
            with pytest.raises(Recapture):
                capture_sums(rank, inputs)
        graph, outs = capture_sums(rank, inputs)
        num_opened = gpu.num_opened
        replay_and_compare(rank, graph, inputs, outs)
        more, other_outs = capture_sums(rank, inputs[:2])
        replay_and_compare(rank, more, inputs[:2], other_outs)
        replay_and_compare(rank, graph, inputs, outs)
        assert gpu.num_opened == num_opened, "a handle was opened twice"
        assert (num_opened > 1) == exports
        rank.all_reduce.check()

    # Where one rank alone cannot export, all copy.
    ranks_do(2, body, gpu=lambda rank: {"exports_tensors": exports or rank == 0})


def test_graphs_copy_their_inputs_to_the_given_place(make_gpu: Callable[..., Any]) -> None:
    def body(rank: Rank) -> None:
        inputs = three_inputs(rank)
        graph, outs = capture_sums(rank, inputs, registered=False)
        replay_and_compare(rank, graph, inputs, outs)
        if isinstance(rank.gpu, ThreadGpu):
            assert rank.gpu.num_opened == 1, "the workspace of the other"

    ranks_do(2, body, make_gpu)


def test_fused_sums_are_captured_too(make_gpu: Callable[..., Any]) -> None:
    def body(rank: Rank) -> None:
        x = rank.gpu.tensor(torch.zeros(2, 32))
        residual, weight = rank.place(torch.zeros(2, 32)), rank.place(torch.ones(32))
        with rank.all_reduce.capture():
            graph, (_, after) = rank.gpu.capture(
                lambda: rank.all_reduce.all_reduce_add_rmsnorm(x, residual, weight, 1e-5)
            )
        for seed in range(3):
            x.copy_(rank.values(64, torch.float32, seed).view(2, 32))
            rank.gpu.replay(graph)
            rank.gpu.synchronize()
            assert torch.equal(after.view(-1).cpu(), summed(4, 64, torch.float32, seed))

    ranks_do(4, body, make_gpu)


@pytest.mark.parametrize("part", [DOUBLE_BUFFER, EXIT])
def test_every_part_of_the_protocol_is_needed_on_a_gpu(part: int) -> None:
    """The release is not among them: one GPU publishes stores in order anyhow, more or less."""
    need_gpu()
    macros = [("HEADRACE_DROP", str(part)), ("HEADRACE_STALL", "1")]

    def body(rank: Rank) -> bool:
        x = rank.gpu.tensor(torch.zeros(4096))
        with rank.all_reduce.capture():
            graph, out = rank.gpu.capture(lambda: rank.all_reduce.all_reduce(x))
        is_right = True
        for seed in range(100):
            if part == EXIT:
                x.copy_(rank.values(4096, torch.float32, seed))
                rank.gpu.replay(graph)
                found = out.clone()
                x.zero_()  # what the exit barrier is for
            else:
                found = rank.all_reduce.all_reduce(rank.values(4096, torch.float32, seed))
                for _ in range(3):
                    rank.all_reduce.all_reduce(x)
            rank.gpu.synchronize()
            is_right &= torch.equal(found.cpu(), summed(2, 4096, torch.float32, seed))
        return is_right

    trial = Trial(1, TRIAL.limit_ns)
    assert False in ranks_do(2, body, StreamGpu, gpu=lambda rank: {"macros": macros}, trial=trial)


def test_groups_are_made_and_left_many_times() -> None:
    run = partial(ranks_do, 2, lambda rank: rank.all_reduce.enabled, trial=Trial(1, TRIAL.limit_ns))
    for _ in range(5):
        assert run() == [True, True]
