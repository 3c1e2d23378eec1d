"""The control page ends the waits of all processes, and tells which rank waited for which."""

import os

import pytest

from headrace.engine_proc.collectives.collectives import CollectiveFailed, CollectiveOutcome
from headrace.engine_proc.collectives.control_page import MAX_RANKS, STATUS, ControlPage, Status


@pytest.fixture
def page() -> ControlPage:
    return ControlPage.create()


def fails(page: ControlPage, rank: int, status: Status) -> None:
    """Write what a kernel of `rank` does."""
    words = (status.outcome, status.peer, status.phase, status.block, status.epoch)
    os.pwrite(page.fd, STATUS.pack(*words), page.status_at(rank))


def test_nothing_has_failed_in_a_new_page(page: ControlPage) -> None:
    for rank in range(MAX_RANKS):
        page.check(rank)
    assert page.aborted is CollectiveOutcome.OK


def test_abort_is_seen_in_every_mapping_first_reason_wins(page: ControlPage) -> None:
    other = ControlPage(page.fd)
    other.abort(CollectiveOutcome.PEER_DIED)
    page.abort(CollectiveOutcome.ABORTED)
    assert page.aborted is other.aborted is CollectiveOutcome.PEER_DIED
    for rank in range(2):
        with pytest.raises(CollectiveFailed) as failed:
            page.check(rank)
        assert (failed.value.outcome, failed.value.rank) == (CollectiveOutcome.PEER_DIED, None)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (CollectiveOutcome.ABORTED, "the workers were told to stop while rank 1 waited for rank 3"),
        (CollectiveOutcome.MISMATCH, "rank 1 called another all-reduce than rank 3"),
        (CollectiveOutcome.LATE, "rank 1 waited too long for rank 3"),
    ],
)
def test_a_rank_reports_its_own_failure_only(
    page: ControlPage, outcome: CollectiveOutcome, text: str
) -> None:
    fails(page, 1, Status(outcome, peer=3, phase=1, block=5, epoch=4_000_000_000))
    with pytest.raises(CollectiveFailed) as failed:
        ControlPage(page.fd).check(1)
    assert str(failed.value) == f"{text}, in call 4000000000, barrier 1, block 5"
    assert (failed.value.outcome, failed.value.rank) == (outcome, 3)
    page.check(0)
    page.check(2)


def test_a_page_is_used_again_once_it_is_cleared(page: ControlPage) -> None:
    page.abort()
    fails(page, 0, Status(CollectiveOutcome.ABORTED, 1, 0, 0, 1))
    page.clear()
    page.check(0)
    assert page.aborted is CollectiveOutcome.OK
