"""Measure the engine's overhead per step, without the model.

Method: the engine's own scheduler, step builder, step channel and link to the detokenizer, with B
        sequences that decode. At the channel's other end a process runs no model. It keeps its core
        busy for 3 ms, long enough for the engine to sleep, and returns the wanted number of tokens.
        What the engine waits beyond that is "worker": encoding, waking, decoding, both ways.
        Sampling is not in it. As in the engine, a step's output is sent to the detokenizer while
        the worker computes the next. "send" is that time, which is not part of "all". With
        --async-scheduling the worker has the next step when it ends one. "one step ahead" is then
        the rest of "all": the time between two results, without the 3 ms. Medians over the steps of
        a round.
        Then steps are built of sequences with penalties and prompts of 2,048 tokens, and encoded.
        Nothing runs them.
Run:    python bench/step_overhead.py --rounds 5
"""

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from headrace.engine_proc.engine_core import step_output
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.engine_proc.step.step_builder import StepBuilder
from headrace.engine_proc.worker.main import LOOK_US
from headrace.ipc.messages import GenerateRequest, Sampling, ToDetokenizer, request_id
from headrace.ipc.sockets import Inbox, Outbox, address
from headrace.ipc.worker_messages import FromWorker, Step, StepResult, ToWorker
from support.report import Quantity, Report, parser

BATCHES = (1, 8, 32)
STEPS = 300
WARM_UP = 20
STEP_S = 0.003  # that the worker pretends to compute
PROMPT_TOKENS = 64
PAGE_TOKENS = 32
SLOT_BYTES = 1 << 20
WAIT_S = 1.0
GREEDY = Sampling()
PENALIZED_BATCHES = (64, 256)
PENALTIES = Sampling(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.1)
PENALIZED_TOKENS = 2048
PENALIZED_STEPS = 40
PARTS = ("schedule", "build step", "worker", "update", "send", "all", "one step ahead")


def answer(step: Step) -> StepResult:
    """Return a token for each row that needs one."""
    return StepResult(array("i", [7] * (len(step.logit_rows) // 4)).tobytes())


def be_worker(step_fd: int, result_fd: int) -> None:
    """Answer steps until killed."""
    steps: StepChannel[ToWorker] = StepChannel(step_fd, ToWorker, LOOK_US)
    results: StepChannel[FromWorker] = StepChannel(result_fd, FromWorker)
    while True:
        step = steps.receive(WAIT_S)
        if step is not None:
            end = time.perf_counter() + STEP_S
            result = answer(step)
            while time.perf_counter() < end:
                pass
            results.send(result)


def be_detokenizer(run_dir: str) -> None:
    """Receive messages until killed."""
    inbox: Inbox[ToDetokenizer] = Inbox(address(run_dir, "detokenizer"), ToDetokenizer)
    while True:
        inbox.receive(1000)


def request(number: int, max_tokens: int, sampling: Sampling = GREEDY) -> GenerateRequest:
    """Make a request."""
    return GenerateRequest(
        id=request_id(0, number),
        detokenizer=0,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=[],
        plan=b"",
    )


class Engine:
    """The engine's loop, with a clock between its parts."""

    def __init__(self, run_dir: str, batch: int) -> None:
        max_tokens = WARM_UP + STEPS + 2
        pages = batch * -(-(PROMPT_TOKENS + max_tokens) // PAGE_TOKENS)
        limits = SchedulerLimits(max_num_seqs=batch, max_num_batched_tokens=8192)
        self._scheduler = Scheduler(PagePool(pages, PAGE_TOKENS), limits)
        self._builder = StepBuilder(batch)
        for number in range(batch):
            prompt = array("I", [number] * PROMPT_TOKENS).tobytes()
            self._scheduler.add(Sequence.of(request(number, max_tokens), prompt))
        self._steps: StepChannel[ToWorker] = StepChannel.create(ToWorker, SLOT_BYTES)
        self._results: StepChannel[FromWorker] = StepChannel.create(FromWorker, SLOT_BYTES)
        self._outbox = Outbox(address(run_dir, "detokenizer"))
        self._outgoing = step_output([])
        self._sent: list[Chunk] = []  # with `step_ahead`
        self._result_at = 0.0
        self.fds = (self._steps.fd, self._results.fd)

    def step(self) -> list[float]:
        """Run a step; return the milliseconds of each of `PARTS` but the last."""
        clock = time.perf_counter
        times = [clock()]
        chunks = self._scheduler.schedule()
        times.append(clock())
        step = self._builder.build(chunks)
        times.append(clock())
        self._steps.send(step)
        sending_at = clock()
        self._outbox.send(*self._outgoing)
        sent_s = clock() - sending_at
        result = self._result()
        times.append(clock() - STEP_S)
        self._outgoing = step_output(
            self._scheduler.update(chunks, ResultReader(result, num_pooled=0))
        )
        times.append(clock() - STEP_S)
        seconds = [end - start for start, end in itertools.pairwise(times)]
        return [s * 1e3 for s in (*seconds, sent_s, times[-1] - times[0])]

    def step_ahead(self) -> float:
        """Send a step and take the result of the one before; return the last of `PARTS`."""
        chunks = self._scheduler.schedule()
        self._steps.send(self._builder.build(chunks))
        self._outbox.send(*self._outgoing)
        began_at = self._result_at
        if self._sent:
            result = self._result()
            self._result_at = time.perf_counter()
            news = self._scheduler.update(self._sent, ResultReader(result, num_pooled=0))
            self._outgoing = step_output(news)
        self._sent = chunks
        return 1e3 * (self._result_at - began_at - STEP_S)

    def _result(self) -> StepResult:
        while (result := self._results.receive(WAIT_S)) is None:
            pass
        assert isinstance(result, StepResult)
        return result


@contextmanager
def process(*args: str, fds: tuple[int, ...] = ()) -> Iterator[None]:
    """Run this file as another process."""
    child = subprocess.Popen([sys.executable, __file__, *args], pass_fds=fds)
    try:
        yield
    finally:
        child.kill()
        child.wait()


@contextmanager
def engine_of(batch: int) -> Iterator[Engine]:
    """Run an engine with its peer processes."""
    with tempfile.TemporaryDirectory() as run_dir, process("detokenizer", run_dir):
        engine = Engine(run_dir, batch)
        with process("worker", *map(str, engine.fds), fds=engine.fds):
            yield engine


def measure(batch: int) -> list[float]:
    """Return the median milliseconds of each of `PARTS`."""
    with engine_of(batch) as engine:
        for _ in range(WARM_UP):
            engine.step()
        parts = [engine.step() for _ in range(STEPS)]
    with engine_of(batch) as engine:
        for _ in range(WARM_UP):
            engine.step_ahead()
        ahead = [engine.step_ahead() for _ in range(STEPS)]
    return [statistics.median(column) for column in (*zip(*parts, strict=True), ahead)]


def measure_penalized(batch: int) -> tuple[float, float, float]:
    """Return the median ms to build a decode step and to encode it, and its last one's bytes."""
    max_tokens = PENALIZED_STEPS + 2
    pages = batch * -(-(PENALIZED_TOKENS + max_tokens) // PAGE_TOKENS)
    limits = SchedulerLimits(max_num_seqs=batch, max_num_batched_tokens=batch * PENALIZED_TOKENS)
    scheduler, builder = Scheduler(PagePool(pages, PAGE_TOKENS), limits), StepBuilder(batch)
    for number in range(batch):
        prompt = array("I", [number] * PENALIZED_TOKENS).tobytes()
        scheduler.add(Sequence.of(request(number, max_tokens, PENALTIES), prompt))
    encoder, clock = msgspec.msgpack.Encoder(), time.perf_counter
    times, encoded = [], b""
    for _ in range(1 + PENALIZED_STEPS):
        chunks = scheduler.schedule()
        began_at = clock()
        step = builder.build(chunks)
        built_at = clock()
        encoded = encoder.encode(step)
        times.append((built_at - began_at, clock() - built_at))
        scheduler.update(chunks, ResultReader(answer(step), num_pooled=0))
    build_s, encode_s = map(statistics.median, zip(*times[1:], strict=True))  # without prompts
    return 1e3 * build_s, 1e3 * encode_s, len(encoded)


def main() -> None:
    """Run."""
    args = parser(__doc__, rounds=5).parse_args()
    report = Report("step_overhead", args)
    systems = [f"B={batch}" for batch in BATCHES]
    quantities = [Quantity(part, "ms per step", {s: [] for s in systems}) for part in PARTS]
    for _ in range(args.rounds):
        for batch, system in zip(BATCHES, systems, strict=True):
            for quantity, ms in zip(quantities, measure(batch), strict=True):
                quantity.samples[system].append(ms)
    systems = [f"B={batch}" for batch in PENALIZED_BATCHES]
    quantities += [
        Quantity(f"penalties: {name}", unit, {system: [] for system in systems})
        for name, unit in (("build", "ms"), ("encode", "ms"), ("message", "bytes"))
    ]
    for _ in range(args.rounds):
        for batch, system in zip(PENALIZED_BATCHES, systems, strict=True):
            for quantity, value in zip(quantities[-3:], measure_penalized(batch), strict=True):
                quantity.samples[system].append(value)
    for quantity in quantities:
        report.add(quantity)
    report.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        be_worker(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["detokenizer"]:
        be_detokenizer(sys.argv[2])
    else:
        main()
