"""Ranks that are processes: they map each other's memory, and outlive each other."""

import signal

import pytest
from gpu_streams import need_gpu
from gpu_threads import library
from rank_process import RankProcesses

from headrace.engine_proc.collectives.collectives import CollectiveOutcome
from headrace.engine_proc.collectives.control_page import ControlPage

DEADLINE_S = 300.0


@pytest.mark.parametrize(("world", "kind"), [(2, "threads"), (2, "cuda"), (4, "cuda")])
def test_processes_sum_and_a_killed_one_ends_all_waits(world: int, kind: str) -> None:
    if kind == "cuda":
        need_gpu()
    else:
        library(world)  # built once, not by each of them
    page = ControlPage.create()
    ranks = RankProcesses(world, kind, page)
    try:
        for rank in range(world):
            ranks.wait(rank, 1, DEADLINE_S)
        assert [said[0] for said in ranks.said] == ["right"] * world
        last = world - 1
        ranks.processes[last].send_signal(signal.SIGKILL)
        ranks.processes[last].wait()
        page.abort(CollectiveOutcome.PEER_DIED)  # as the engine does, whose child it is
        for rank in range(last):
            ranks.wait(rank, 2, DEADLINE_S)
            assert ranks.processes[rank].wait(DEADLINE_S) == 0
            outcome, text = ranks.said[rank][1].split(": ", 1)
            assert outcome in ("ABORTED", "PEER_DIED"), text
    finally:
        ranks.stop()
