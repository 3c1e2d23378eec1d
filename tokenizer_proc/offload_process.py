"""A process that handles the requests that take long, so that none holds a tokenizer's loop.

It reads `Offloaded`s from standard input and writes `Handled`s to standard output; the first
message is a `Setup`. The kernel ends it after too much CPU time for one request. It shares nothing
with its parent (`offload_pool.py`), which starts another for the next request.
"""

import os
import resource
import signal
import sys
import time
from itertools import groupby

import msgspec
import setproctitle

from headrace import logs
from headrace.board.board import Board, Seat
from headrace.config.process_configs import TokenizerConfig
from headrace.ipc.messages import GenerateRequest, HttpRequest
from headrace.runtime.process import die_with_parent
from headrace.system.malloc import give_back
from headrace.tokenizer_proc.jobs.child_pipe import read, write
from headrace.tokenizer_proc.jobs.stages import (
    Body,
    ImmediateResponse,
    Outcome,
    Sequences,
    Stages,
)
from headrace.tokenizer_proc.main import num_threads
from headrace.tokenizer_proc.routed_models import RoutedModel, RoutedModels

CPU_S = 120  # of a request, on all cores; 32 MB of text take 5 s to encode
POLL_INTERVAL_S = 0.001  # between looks at a grammar


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """What the process is started with."""

    config: TokenizerConfig
    title: str  # of the process
    niceness: int  # beside its parent's
    log_level: str
    log_format: str


class Offloaded(msgspec.Struct, frozen=True, array_like=True):
    """A request, and its body."""

    request: HttpRequest
    body: memoryview


class Handled(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a request: an answer, or sequences, as `jobs.stages` has them."""

    response: ImmediateResponse | None = None
    requests: list[GenerateRequest] = []
    prompts: list[memoryview] = []  # u32; sequences with the same prompt follow each other
    counts: list[int] = []  # of the sequences of each prompt

    @classmethod
    def of(cls, outcome: Outcome) -> "Handled":
        """Return an outcome as a message, each prompt once."""
        if isinstance(outcome, ImmediateResponse):
            return cls(outcome)
        same = [list(prompts) for _, prompts in groupby(outcome.prompts, key=id)]
        prompts = [prompts[0].cast("B") for prompts in same]
        return cls(None, outcome.requests, prompts, list(map(len, same)))

    @property
    def outcome(self) -> Outcome:
        """The outcome that this is the message of."""
        if self.response is not None:
            return self.response
        prompts = [prompt.cast("I") for prompt in self.prompts]
        pairs = zip(prompts, self.counts, strict=True)
        return Sequences(self.requests, [prompt for prompt, count in pairs for _ in range(count)])


class RequestHandler:
    """Handles one request after the other, as long as each takes."""

    def __init__(self, config: TokenizerConfig) -> None:
        os.environ.update(FASTOKENS_BPE_THREADS=str(num_threads()))
        board = Board.create([Seat("tokenizer", 0)])  # GETs, which need the server's, do not come
        self._models = RoutedModels(config, board)
        for model in self._models:
            model.encoder.load_fast()

    def handle(self, offloaded: Offloaded) -> Outcome:
        """Return the outcome of a request."""
        request, body = offloaded.request, offloaded.body
        job = self._models.job(request, body, stages_of)
        job.begin()
        while job.outcome is None:
            if job.is_waiting:
                time.sleep(POLL_INTERVAL_S)
            else:
                self._models.encode([job])
        assert isinstance(job.outcome, ImmediateResponse | Sequences)
        return job.outcome


def stages_of(model: RoutedModel, request: HttpRequest, body: Body) -> Stages:
    """Handle a request as long as it takes."""
    return model.routes.handle(request, body)


def main() -> None:
    """Handle requests until standard input ends."""
    die_with_parent(os.getppid(), signal.SIGKILL)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = read(source, Setup)
    if setup is None:
        return
    os.nice(setup.niceness)
    setproctitle.setproctitle(setup.title)
    logs.setup(setup.title.removeprefix("headrace: "), setup.log_level, setup.log_format)
    handler = RequestHandler(setup.config)
    while (offloaded := read(source, Offloaded)) is not None:
        limit_cpu()
        write(sink, Handled.of(handler.handle(offloaded)))
        del offloaded
        give_back()


def limit_cpu() -> None:
    """Have the kernel end this process after so much more CPU time."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(spent.ru_utime + spent.ru_stime) + CPU_S
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


if __name__ == "__main__":
    main()
