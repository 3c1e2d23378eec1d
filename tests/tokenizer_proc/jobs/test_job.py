"""Lines that are logged while a request is handled have its id."""

import logging
from collections.abc import Iterator

import pytest

from headrace.ipc.messages import HttpRequest
from headrace.logs import request_id_of
from headrace.tokenizer_proc.jobs.job import Job
from headrace.tokenizer_proc.jobs.stages import ImmediateResponse, Stages, Text

log = logging.getLogger(__name__)


class Collector(logging.Handler):
    """Collects the request id of each line, as a formatter finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.ids.append(request_id_of(record))


@pytest.fixture
def collector() -> Iterator[Collector]:
    handler = Collector()
    log.addHandler(handler)
    logging.getLogger("headrace.tokenizer_proc.jobs.job").addHandler(handler)
    yield handler
    log.removeHandler(handler)
    logging.getLogger("headrace.tokenizer_proc.jobs.job").removeHandler(handler)


def stages(fails: bool) -> Stages:
    log.warning("before its text is encoded")
    yield [Text("text", True)]
    if fails:
        raise RuntimeError
    log.warning("after it")
    return ImmediateResponse(200, b"")


def test_lines_of_a_job_have_the_id_of_its_request(collector: Collector) -> None:
    jobs = [
        Job(HttpRequest(1, "POST", "/", 0.0, request_id=id), 0, stages(id == "bad"))
        for id in ("one", "bad")
    ]
    for job in jobs:
        job.begin()
    log.warning("about none")
    for job in jobs:
        job.advance([])
    assert collector.ids == ["one", "bad", "", "one", "bad"]
