"""What can fail in the all-reduce of GPUs fails on all ranks, and is named.

In captures of graphs, in the set-up of a group, and while it sums.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_threads import DEADLINE_S, MAPPED_PAGES, ThreadGpu
from ipc_ranks import (
    Rank,
    capture_sums,
    ranks_do,
    replay_and_compare,
    three_inputs,
)

from headrace.engine_proc.collectives.collectives import (
    CollectiveFailed,
    CollectiveOutcome,
)
from headrace.engine_proc.worker.parallel.graph_inputs import Recapture
from headrace.engine_proc.worker.parallel.ipc_group import Trial
from headrace.errors import ConfigError
from headrace.system.all_reduce_policy import Topology

pytestmark = pytest.mark.usefixtures("in_place")


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
    captured = threading.Event()

    def body(rank: Rank) -> None:
        x = rank.gpu.tensor(torch.zeros(64))
        error = ZeroDivisionError if rank.rank else CollectiveFailed
        with pytest.raises(error, match="division by zero"), rank.all_reduce.capture():
            if rank.rank == 1:
                assert captured.wait(DEADLINE_S)
                assert 1 / (1 - rank.rank)
            rank.gpu.capture(lambda: rank.all_reduce.all_reduce(x))
            captured.set()

    ranks_do(2, body)


def test_a_rank_that_fails_between_warm_ups_ends_them(make_gpu: Callable[..., Any]) -> None:
    """The others' sums wait for it, and their hosts for those."""
    warming_up = threading.Event()

    def body(rank: Rank) -> None:
        x = rank.place(torch.ones(64))
        error = ZeroDivisionError if rank.rank else CollectiveFailed
        with pytest.raises(error), rank.all_reduce.capture():
            if rank.rank == 1:
                assert warming_up.wait(DEADLINE_S)
                assert 1 / (1 - rank.rank)
            rank.gpu.waits = False
            rank.all_reduce.all_reduce(x)
            warming_up.set()
            rank.gpu.synchronize()
            rank.all_reduce.all_reduce(x)
            pytest.fail("it has gone on without the other")

    ranks_do(2, body, make_gpu)


@pytest.mark.parametrize("what", ["export", "open"])
def test_a_driver_that_shares_no_graph_memory_is_no_end(what: str) -> None:
    """After it has refused, inputs are copied."""

    def body(rank: Rank) -> None:
        inputs = three_inputs(rank)
        rank.gpu.fails = [what] * (rank.rank == 1)
        with pytest.raises(Recapture, match=f"no {what} today"):
            capture_sums(rank, inputs)
        graph, outs = capture_sums(rank, inputs)
        replay_and_compare(rank, graph, inputs, outs)
        rank.all_reduce.check()

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


def test_a_rank_without_memory_for_the_trial_ends_it() -> None:
    """The others' sums wait for it, however long."""

    class Full(ThreadGpu):
        def allocate(self, num_bytes: int) -> int:
            if self.memory.sizes:  # the workspace is there
                self.fails = ["allocate"]
            return super().allocate(num_bytes)

    kinds = iter((Full, ThreadGpu))
    making = threading.Lock()

    def make(world: int) -> ThreadGpu:
        with making:
            return next(kinds)(world)

    (why_not, same) = ranks_do(2, lambda rank: rank.all_reduce.why_not, make)
    assert why_not == same
    assert "OSError: no allocate today" in why_not


def test_a_trial_that_faults_is_explained_on_all_ranks() -> None:
    """After a fault, every call of a process's driver fails."""

    class Faulty(ThreadGpu):
        def launch(self, *_: Any) -> None:
            self.fails = ["launch", "free", "close"]
            raise OSError("an illegal address")

    def body(rank: Rank) -> None:
        pytest.fail("it has been made")

    with pytest.raises(ConfigError, match="use --disable-custom-all-reduce"):
        ranks_do(2, body, Faulty)
    MAPPED_PAGES.clear()  # what the drivers of processes that end would do


def test_nccl_reads_no_peers_memory_after_a_failed_trial() -> None:
    def body(rank: Rank) -> bool | None:
        return rank.nccl.is_trusted

    assert ranks_do(2, body) == [True, True]
    assert ranks_do(2, body, gpu=lambda rank: {"fails": ["launch"] * rank}) == [False, False]
    assert ranks_do(2, body, gpu=lambda rank: {"fails": ["map_host"] * rank}) == [True, True]


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
        ({"disabled": lambda rank: "NCCL_P2P_DISABLE is set" * rank}, "NCCL_P2P_DISABLE is set"),
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


@pytest.mark.parametrize("gathers", [False, True])
def test_a_rank_that_gives_up_ends_the_others_waits(
    make_gpu: Callable[..., Any], *, gathers: bool
) -> None:
    waiting = threading.Event()

    def body(rank: Rank) -> CollectiveFailed | None:
        x, out = rank.place(torch.ones(64)), rank.place(torch.ones(2, 64))
        if rank.rank == 1:
            assert waiting.wait(DEADLINE_S)
            rank.all_reduce.abort()
            return None
        rank.gpu.waits = False
        for _ in range(5):  # those that are queued drain at once
            if gathers:
                rank.all_reduce.all_gather(x, out)
            else:
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
