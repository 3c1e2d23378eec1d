"""A worker that fails ends what the others' GPUs wait for."""

import pytest

from headrace.engine_proc.collectives.collectives import CollectiveOutcome
from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.engine_proc.worker.main import ending_waits


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_worker_that_fails_ends_the_others_waits(error: type[BaseException]) -> None:
    page = ControlPage.create()
    with ending_waits(page.fd):
        pass
    assert page.aborted is CollectiveOutcome.OK
    with pytest.raises(error), ending_waits(page.fd):
        raise error
    assert page.aborted is CollectiveOutcome.ABORTED


def test_a_worker_without_peers_has_no_waits_to_end() -> None:
    with pytest.raises(ZeroDivisionError), ending_waits(None):
        raise ZeroDivisionError
