"""The all-reduce of GPUs, whole: exchange, graphs and kernels.

GPUs are made of CPU threads, and where there is a real one, ranks are streams of it, too.
"""

import functools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gpu_streams import StreamGpu, need_gpu
from gpu_threads import DEADLINE_S, ThreadGpu, ThreadPeers, on_ranks
from torch import Tensor

from headrace.engine_proc.collectives.collectives import (
    CollectiveFailed,
    CollectiveOutcome,
    Collectives,
)
from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.engine_proc.worker.parallel import ipc_all_reduce
from headrace.engine_proc.worker.parallel.graph_inputs import Recapture
from headrace.engine_proc.worker.parallel.ipc_all_reduce import IpcAllReduce, Parts, PeerGpu
from headrace.engine_proc.worker.parallel.ipc_group import Trial
from headrace.system.all_reduce_policy import Algorithm, Topology

MAX_BYTES = 128 << 10
TRIAL = Trial(num_sums=4, limit_ns=int(DEADLINE_S * 1e9))
DOUBLE_BUFFER, EXIT = 2, 4  # Part, of csrc/collectives/all_reduce.cuh
EPOCHS = [1, 0xFFFFFFE8]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Nccl(Collectives[Tensor]):
    """Counts what comes to it, and gives its input back."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return x

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        self.calls.append("all_gather")

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        self.calls.append("broadcast")

    def capture(self) -> Any:
        raise AssertionError

    def abort(self) -> None:
        self.calls.append("abort")

    def check(self) -> None:
        self.calls.append("check")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture(params=["threads", "streams"])
def make_gpu(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """What makes a rank's GPU."""
    if request.param == "threads":
        return ThreadGpu
    need_gpu()
    return StreamGpu


class Rank:
    """A rank with its GPU.

    Args:
        gpu: for each rank, what its GPU is given.
        uuid, topology, disabled: for each rank, as in `PeerGpu`.
    """

    def __init__(
        self,
        peers: ThreadPeers,
        page_fd: int,
        make_gpu: Callable[..., Any],
        gpu: Callable[[int], dict[str, Any]] = lambda rank: {},
        uuid: Callable[[int], str] = "GPU-{}".format,
        topology: Callable[[int], Topology] = lambda rank: Topology.NVLINK,
        disabled: Callable[[int], bool] = lambda rank: False,
        **options: Any,
    ) -> None:
        self.rank, self.world, self.peers = peers.rank, peers.world, peers
        self.gpu = make_gpu(peers.world, **gpu(peers.rank))
        self.page = ControlPage(page_fd)
        self.nccl = Nccl()
        parts = Parts(lambda: self.gpu, lambda: self.gpu.kernels, lambda: self.gpu.stream)
        options = {"trial": TRIAL} | options
        own = peers.rank
        self.all_reduce = IpcAllReduce(
            peers,
            PeerGpu(uuid(own), "host", topology(own), MAX_BYTES, disabled(own)),
            page=self.page,
            parts=parts,
            fallback=self.nccl,
            **options,
        )
        self.gpu.waits = True

    def values(self, num_lanes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        return self.place(values(self.rank, num_lanes, dtype, seed))

    def place(self, x: Tensor) -> Tensor:
        """Return a tensor on this rank's GPU."""
        return x.to(self.gpu.device)


def values(rank: int, num_lanes: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return what a rank gives."""
    random = np.random.default_rng([rank, seed])
    return torch.from_numpy(random.standard_normal(num_lanes, np.float32)).to(dtype)


@functools.lru_cache(maxsize=256)  # all ranks compare with the same
def summed(world: int, num_lanes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return the sum as it should be: fp32, by rank, rounded once."""
    total = values(0, num_lanes, dtype, seed).float()
    for rank in range(1, world):
        total = total + values(rank, num_lanes, dtype, seed).float()
    return total.to(dtype)


def ranks_do(
    world: int,
    body: Callable[[Rank], Any],
    make_gpu: Callable[..., Any] = ThreadGpu,
    **options: Any,
) -> list[Any]:
    """Run `body` on all ranks of a group, which is closed if it is whole."""
    page = ControlPage.create()

    def run(peers: ThreadPeers) -> Any:
        rank = Rank(peers, page.fd, make_gpu, **options)
        try:
            result = body(rank)
        except BaseException:
            page.abort()  # kernels of the others wait for ever
            raise
        enabled, failed = rank.all_reduce.enabled, rank.page.aborted is not CollectiveOutcome.OK
        rank.gpu.synchronize()
        rank.all_reduce.close()
        if enabled and failed:  # what it leaves to the end of the process
            rank.gpu.unmap_host(rank.page.address)
        assert rank.nccl.calls[-1] == "close"
        if isinstance(rank.gpu, ThreadGpu):
            assert not rank.gpu.opened.sizes, "something is still mapped"
            if enabled and not failed:
                assert not [n for n in rank.gpu.memory.sizes.values() if n > 1 << 20]
        return result

    return on_ranks(world, run)


def all_equal(results: list[Tensor], wanted: Tensor) -> None:
    for result in results:
        assert result.dtype == wanted.dtype
        assert torch.equal(result.cpu(), wanted)


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
        for other in (x(5), x(8, dtype=torch.float64), x(MAX_BYTES // 4 + 4), x(0)):
            assert ours.choice(other).algorithm is Algorithm.NCCL
            assert ours.all_reduce(other) is other
        ours.all_gather(x(8), x(16))
        ours.broadcast(x(8))
        assert rank.nccl.calls == ["all_reduce"] * 4 + ["all_gather", "broadcast"]

    ranks_do(2, body)


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
        assert not rank.nccl.calls
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


def capture_sums(
    rank: Rank, inputs: list[Tensor], registered: bool = True
) -> tuple[Any, list[Tensor]]:
    """Capture a graph with the sum of each input."""
    with rank.all_reduce.capture(registered):
        rank.all_reduce.all_reduce(inputs[0])  # to warm up; not captured
        return rank.gpu.capture(lambda: [rank.all_reduce.all_reduce(x) for x in inputs])


def replay_and_compare(
    rank: Rank, graph: Any, inputs: list[Tensor], outs: list[Tensor], num_times: int = 8
) -> None:
    """Run a graph with inputs that change, and eager sums between."""
    for seed in range(1, 1 + num_times):
        for x in inputs:
            x.copy_(rank.values(x.numel(), x.dtype, seed))
        rank.gpu.replay(graph)
        eager = rank.all_reduce.all_reduce(rank.values(40, torch.float32, seed))
        rank.gpu.synchronize()
        for x, out in zip(inputs, outs, strict=True):
            assert torch.equal(out.cpu(), summed(rank.world, x.numel(), x.dtype, seed))
        assert torch.equal(eager.cpu(), summed(rank.world, 40, torch.float32, seed))


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


def three_inputs(rank: Rank) -> list[Tensor]:
    """Return tensors in the middle of allocations, elsewhere on each rank."""
    offset = 48 + 16 * rank.rank
    sizes = (2, 7, 60)
    return [rank.gpu.tensor(torch.zeros(8 * n, dtype=torch.bfloat16), offset) for n in sizes]


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


def test_ranks_that_capture_different_graphs_all_fail() -> None:
    def body(rank: Rank) -> str:
        x = rank.gpu.tensor(torch.zeros(64))
        small = rank.gpu.tensor(torch.zeros(32))
        with pytest.raises(CollectiveFailed) as failed:
            capture_sums(rank, [x, x] if rank.rank == 0 else [x, small])
        fewer = [x, x] if rank.rank == 0 else [x]
        with pytest.raises(CollectiveFailed, match="captured 1 sums and rank 0 2"):
            capture_sums(rank, fewer)
        graph, outs = capture_sums(rank, [x])
        replay_and_compare(rank, graph, [x], outs)  # nothing is broken
        return str(failed.value)

    text = "rank 1 captured 2 sums and rank 0 2; they differ from number 1 on"
    assert ranks_do(2, body) == [text] * 2


def test_a_rank_that_cannot_capture_takes_the_others_with_it() -> None:
    def body(rank: Rank) -> None:
        x = rank.gpu.tensor(torch.zeros(64))
        error = ZeroDivisionError if rank.rank else CollectiveFailed
        with pytest.raises(error, match="division by zero"), rank.all_reduce.capture():
            rank.gpu.capture(lambda: rank.all_reduce.all_reduce(x))
            assert 1 / (1 - rank.rank)
        graph, outs = capture_sums(rank, [x])
        replay_and_compare(rank, graph, [x], outs)

    ranks_do(2, body)


# --- what can fail ---


@pytest.mark.parametrize("what", ["allocate", "map_host", "export", "open", "launch"])
def test_what_fails_on_one_rank_turns_it_off_on_all(what: str) -> None:
    def body(rank: Rank) -> tuple[bool, str]:
        x = torch.ones(8)
        assert rank.all_reduce.all_reduce(x) is x
        with rank.all_reduce.capture():
            assert rank.all_reduce.all_reduce(x) is x
        rank.all_reduce.check()  # the page is clean
        assert not rank.gpu.memory.sizes
        return rank.all_reduce.enabled, rank.all_reduce.why_not

    trial = Trial(num_sums=4, limit_ns=20_000_000)
    results = ranks_do(4, body, gpu=lambda rank: {"fails": [what] * (rank == 2)}, trial=trial)
    assert len(set(results)) == 1
    enabled, why_not = results[0]
    assert not enabled
    assert f"rank 2: OSError: no {what} today" in why_not


def test_a_workspace_that_cannot_be_shared_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadGpu, "export", lambda *_: None)
    (why_not, same) = ranks_do(2, lambda rank: rank.all_reduce.why_not)
    assert why_not == same
    assert "cannot share this GPU's memory" in why_not


def test_memory_that_is_not_the_peers_is_found_out() -> None:
    """A driver that says yes and maps something else: flags come, numbers do not."""

    class Liar(ThreadGpu):
        def read(self, address: int, num_bytes: int) -> bytes:
            found = bytearray(super().read(address, num_bytes))
            found[5] ^= 1
            return bytes(found)

    results = ranks_do(2, lambda rank: rank.all_reduce.why_not, Liar)
    assert len(set(results)) == 1
    assert "ArithmeticError: sum 0 of one-shot is wrong" in results[0]


@pytest.mark.parametrize(
    ("options", "why_not"),
    [
        ({"disabled": lambda rank: rank == 1}, "--disable-custom-all-reduce"),
        ({"topology": lambda rank: Topology(2 * rank)}, "cannot read each other's memory"),
        ({"uuid": lambda rank: "GPU-0"}, "two ranks have the same GPU"),
    ],
)
def test_groups_that_cannot_be_are_not_made(options: dict[str, Any], why_not: str) -> None:
    results = ranks_do(2, lambda rank: rank.all_reduce.why_not, **options)
    assert all(why_not in text for text in results)


def test_ranks_may_share_a_gpu_in_tests() -> None:
    options = {"uuid": lambda rank: "GPU-0", "shares_gpu": True}
    assert ranks_do(2, lambda rank: rank.all_reduce.why_not, **options) == ["", ""]


def test_a_rank_that_gives_up_ends_the_others_waits(make_gpu: Callable[..., Any]) -> None:
    waiting = threading.Event()

    def body(rank: Rank) -> CollectiveFailed | None:
        x = rank.place(torch.ones(64))
        if rank.rank == 1:
            assert waiting.wait(DEADLINE_S)
            rank.all_reduce.abort()
            return None
        rank.gpu.waits = False
        for _ in range(5):  # those that are queued drain at once
            rank.all_reduce.all_reduce(x)
        rank.all_reduce.check()
        waiting.set()
        rank.gpu.synchronize()
        with pytest.raises(CollectiveFailed) as failed:
            rank.all_reduce.check()
        return failed.value

    failed, _ = ranks_do(2, body, make_gpu)
    assert (failed.outcome, failed.rank) == (CollectiveOutcome.ABORTED, 1)
    assert "told to stop while rank 0 waited for rank 1, in call 9, barrier 0" in str(failed)


def test_ranks_that_sum_different_sizes_fail_and_do_not_mix_them(
    make_gpu: Callable[..., Any],
) -> None:
    def body(rank: Rank) -> CollectiveFailed:
        for size in (64, 1024 if rank.rank else 1028, 64):
            rank.all_reduce.all_reduce(rank.place(torch.ones(size)))
        rank.gpu.synchronize()
        with pytest.raises(CollectiveFailed) as failed:
            rank.all_reduce.check()
        return failed.value

    for rank, failed in enumerate(ranks_do(2, body, make_gpu)):
        assert failed.rank == 1 - rank
        assert failed.outcome in (CollectiveOutcome.MISMATCH, CollectiveOutcome.ABORTED)
    assert "called another all-reduce than rank" in str(failed) or "told to stop" in str(failed)


def test_a_second_stream_is_refused_and_the_first_goes_on() -> None:
    def body(rank: Rank) -> None:
        x = torch.ones(8)
        rank.all_reduce.all_reduce(x)
        rank.gpu.stream = 2
        with pytest.raises(RuntimeError, match="belongs to one stream"):
            rank.all_reduce.all_reduce(x)
        rank.gpu.stream = 1
        out = rank.all_reduce.all_reduce(x)
        rank.gpu.synchronize()
        assert torch.equal(out, 2 * x)

    ranks_do(2, body)


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
