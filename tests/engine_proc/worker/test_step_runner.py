"""A step without memory fails on all workers, and nothing is run before they are told to go on."""

import os
import sys
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.engine_proc.collectives.collectives import CollectiveFailed, CollectiveOutcome
from headrace.engine_proc.collectives.shm_all_reduce import WATCHER, ShmAllReduce
from headrace.engine_proc.shm.hidden_link import HiddenLink
from headrace.engine_proc.shm.stage_links import StageLinks
from headrace.engine_proc.worker.execution.out_of_memory import is_out_of_memory
from headrace.engine_proc.worker.execution.runner import MaskSource, no_masks
from headrace.engine_proc.worker.step_runner import FAILED_BEFORE, StepRunner, TooLarge
from headrace.exit_status import ExitStatus
from headrace.ipc.worker_messages import Step, StepFailed, StepResult

DONE = StepResult(b"done")


class Scripted:
    """A runner that does in each step what it was told."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self._acts = list(acts)

    def run(self, step: Step, masks_of: MaskSource = no_masks) -> StepResult:
        self._acts.pop(0)()
        return DONE


def fine() -> None: ...


def fail(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def step(num_tokens: int = 3) -> Step:
    return Step(
        token_ids=array("i", range(num_tokens)).tobytes(),
        positions=b"",
        sequences=b"",
        page_table=b"",
        logit_rows=b"",
        rows=b"",
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("a step of 3 tokens does not fit"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("Failed to allocate memory for batch_prefill in AlignedAllocator"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (CollectiveFailed(CollectiveOutcome.LATE, 1, "rank 0 waited too long"), False),
    ],
)
def test_lack_of_memory_is_distinguished_from_other_errors(
    error: BaseException, expected: bool
) -> None:
    assert is_out_of_memory(error) is expected


def test_torch_on_the_cpu_says_so_too() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 50)
    assert is_out_of_memory(error.value)


def test_nothing_is_run_after_a_failure_until_it_is_asked_for() -> None:
    attempts = StepRunner(Scripted(fine, fail(MemoryError("no room")), fine))
    told = [attempts.run(step(), no_masks) for _ in range(3)]
    assert told[0] == DONE
    assert told[1] == StepFailed("there is no memory for a step of 3 tokens: no room")
    assert told[2] == StepFailed("a step before it has failed")
    attempts.resume()
    assert attempts.run(step(), no_masks) == DONE


def test_what_torch_keeps_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[object] = []

    class Tensor:
        def __del__(self) -> None:
            alive.remove(self_id)

    def hold_and_fail() -> None:
        tensor = Tensor()
        assert tensor
        alive.append(self_id)
        raise MemoryError

    self_id, seen = "tensor", []
    cuda = SimpleNamespace(is_initialized=lambda: True, empty_cache=lambda: seen.append([*alive]))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    StepRunner(Scripted(hold_and_fail)).run(step(), no_masks)
    assert seen == [[]], "when it is, no frame of the error holds a tensor any more"


def test_one_token_without_memory_is_the_worker_s_end() -> None:
    with pytest.raises(MemoryError):
        StepRunner(Scripted(fail(MemoryError()))).run(step(1), no_masks)


@pytest.mark.parametrize("outcome", [CollectiveOutcome.PEER_DIED, CollectiveOutcome.MISMATCH])
def test_other_failures_are_the_worker_s_end(outcome: CollectiveOutcome) -> None:
    lost = CollectiveFailed(outcome, 1, "rank 1")
    with pytest.raises(CollectiveFailed):
        StepRunner(Scripted(fail(lost))).run(step(), no_masks)
    with pytest.raises(ValueError, match="wrong"):
        StepRunner(Scripted(fail(ValueError("wrong")))).run(step(), no_masks)


def test_worker_without_a_way_back_ends_when_out_of_memory() -> None:
    attempts = StepRunner(Scripted(fail(MemoryError("no room"))), None, is_alone=False)
    with pytest.raises(TooLarge, match="a step of 3 tokens: no room") as error:
        attempts.run(step(), no_masks)
    assert error.value.exit_status is ExitStatus.SHORT_OF


def test_workers_fail_together_and_go_on_with_the_right_sums() -> None:
    """Rank 1 fails before its second sum, and in another step after the last: rank 0 has a result.

    Sums are of different lengths, so that halves of rounds would show.
    """
    fd = ShmAllReduce.create(2)
    groups = [ShmAllReduce(fd, rank, 2) for rank in range(2)]
    watcher = ShmAllReduce(fd, WATCHER, 2)
    os.close(fd)
    sums: dict[int, list[list[float]]] = {0: [], 1: []}

    def add(rank: int, count: int) -> None:
        numbers = np.arange(count, dtype=np.float32) * (rank + 1)
        sums[rank].append(groups[rank].all_reduce(numbers).tolist())

    def work(rank: int, counts: list[int], error: BaseException | None = None) -> None:
        for count in counts:
            add(rank, count)
        if error is not None and rank == 1:
            raise error

    acts = [([4], None), ([9], MemoryError()), ([2, 3], MemoryError()), ([5, 6], None)]
    runners = [
        Scripted(*(lambda r=rank, c=c, e=e: work(r, c, e) for c, e in acts)) for rank in range(2)
    ]
    runners[0]._acts[1] = lambda: work(0, [9, 8])  # waits for a rank that does not come
    attempts = [
        StepRunner(runner, group, is_alone=False)
        for runner, group in zip(runners, groups, strict=True)
    ]
    told = []
    with ThreadPoolExecutor(2) as pool:
        for _ in acts:
            told.append(list(pool.map(lambda each: each.run(step(), no_masks), attempts)))
            if any(isinstance(each, StepFailed) for each in told[-1]):
                watcher.revive()
                for each in attempts:
                    each.resume()
    kinds = [[type(each) for each in pair] for pair in told]
    both, none = [StepResult, StepResult], [StepFailed, StepFailed]
    assert kinds == [both, none, [StepResult, StepFailed], both]
    assert told[1][0] == StepFailed("rank 1 failed")
    assert sums[0] == sums[1] == [[3.0 * i for i in range(n)] for n in (4, 9, 2, 3, 5, 6)]
    for group in (*groups, watcher):
        group.close()


def test_a_step_that_fails_in_a_stage_fails_in_all() -> None:
    """The second stage fails in another step, while the first one is ahead of it."""
    fd = HiddenLink.create()
    after, before = (HiddenLink(fd, 4, 3, 1) for _ in range(2))
    os.close(fd)
    links = StageLinks(after=after), StageLinks(before)
    no_room = fail(MemoryError("no room"))
    ran: list[list[float]] = []

    def send(number: float) -> Callable[[], object]:
        def act() -> None:
            links[0].room(1)[:] = number

        return act

    def note() -> None:
        assert links[1].hidden is not None
        ran.append(links[1].hidden.ravel().tolist())

    first = StepRunner(Scripted(send(1), no_room, *map(send, (3, 4, 5))), links=links[0])
    last = StepRunner(Scripted(note, no_room, note), links=links[1])
    told: list[tuple[object, object]] = []

    def run(num_steps: int) -> None:
        results = [[each.run(step(), no_masks) for _ in range(num_steps)] for each in (first, last)]
        told.extend(zip(*map(lambda own: map(type, own), results), strict=True))
        for each in (first, last):
            each.resume()

    run(3)  # the second one fails in the first stage
    run(2)  # and one in the last
    run(1)
    good, bad = StepResult, StepFailed
    assert told == [(good, good), (bad, bad), (bad, bad), (good, bad), (good, bad), (good, good)]
    assert ran == [[1.0], [5.0]]


def test_a_worker_does_not_wait_for_a_step_that_failed_before() -> None:
    """In the stage before, rank 1 fails behind its last sum, so that rank 0 has a result."""
    group_fd = ShmAllReduce.create(2)
    groups = [ShmAllReduce(group_fd, rank, 2) for rank in range(2)]
    watcher = ShmAllReduce(group_fd, WATCHER, 2)
    os.close(group_fd)
    attempts = []
    for rank, group in enumerate(groups):
        fd = HiddenLink.create()
        after, before = (HiddenLink(fd, 2, 3, 1) for _ in range(2))
        os.close(fd)
        after.room(1)
        after.send() if rank else after.send(1)
        add = Scripted(lambda group=group: group.all_reduce(np.ones(4, np.float32)))
        attempts.append(StepRunner(add, group, is_alone=False, links=StageLinks(before)))
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(each.run, step(), no_masks) for each in attempts]
        try:
            said = [each.result(timeout=30) for each in told]
        finally:
            watcher.abort()  # lets a worker go that waits
    assert said == [StepFailed("rank 1 failed"), StepFailed(FAILED_BEFORE)]
    for group in (*groups, watcher):
        group.close()
