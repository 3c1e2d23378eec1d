"""A scheduler whose steps an executor runs, and the prompts that tests give it."""

from array import array
from collections.abc import Callable
from typing import Any

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.scheduling.speculation import Speculation
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.step.step_builder import StepBuilder
from headrace.engine_proc.worker.execution.cpu_sampler import Sampler
from headrace.engine_proc.worker.execution.executor import Executor
from headrace.engine_proc.worker.execution.runner import GenerationRunner
from headrace.ipc.messages import GenerateRequest, Sampling, request_id
from headrace.ipc.worker_messages import Step

PAGE_TOKENS, NUM_PAGES, NUM_STATES = 16, 16, 24
NUM_TOKENS = 24
VOCAB_SIZE = 96  # of all tiny models
STEP_S = 0.1  # whatever is in it: drafts cost nothing
# The first ends within a page, the second on a border, the third has several pages.
PROMPTS = [[17, 3, 94, 55, 8], [*range(20, 52)], [(7 * i) % 90 + 3 for i in range(53)]]


class HalfRightProposer(Speculation):
    """Knows the answers. One guess in four is wrong."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__()
        self._expected = dict(zip(map(tuple, PROMPTS), answers, strict=True))

    def propose(self, sequence: Sequence, most: int) -> "array[int]":
        answer = self._expected[tuple(sequence.tokens[: sequence.num_prompt])]
        first = sequence.num_generated
        guesses = answer[first : first + 3] if first + 1 < len(answer) else []
        if guesses and first % 4 == 0:
            guesses[-1] = (guesses[-1] + 1) % VOCAB_SIZE
        return array("i", guesses[:most])


class Generation:
    """A scheduler whose steps an executor runs: an engine without its links.

    Args:
        make: makes an executor of so many pages and states; another one after a death.
        depth: steps that are open at once; with 2, one is sent while another is run.
    """

    def __init__(
        self,
        make: Callable[..., Executor],
        *,
        num_pages: int = NUM_PAGES,
        num_states: int = NUM_STATES,
        budget: int = 64,
        max_num_seqs: int = 4,
        depth: int = 1,
        **options: Any,
    ) -> None:
        self._make = lambda: make(
            num_pages=num_pages, page_tokens=PAGE_TOKENS, num_states=num_states
        )
        self._depth = depth
        self._num_requests = 0
        self._open: list[tuple[list[Chunk], Step]] = []
        self._builder = StepBuilder(max_num_seqs)
        self.slots = StateSlots(num_states)
        self.scheduler = Scheduler(
            PagePool(num_pages, PAGE_TOKENS),
            SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
            slots=self.slots,
            **options,
        )
        self.start_worker()

    def start_worker(self) -> None:
        """Begin with an executor that knows nothing."""
        executor = self._make()
        self._runner = GenerationRunner(executor, Sampler(VOCAB_SIZE, threads=1))

    def add(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> Sequence:
        """Ask for the greedy text of a prompt."""
        self._num_requests += 1
        request = GenerateRequest(
            id=request_id(0, self._num_requests),
            detokenizer=0,
            max_tokens=num_tokens,
            sampling=Sampling(),
            stop_token_ids=[],
            plan=b"",
        )
        sequence = Sequence.of(request, array("I", prompt).tobytes())
        self.scheduler.add(sequence)
        return sequence

    def die(self) -> None:
        """Lose the worker in the middle of a step."""
        self._send()
        self.scheduler.lose_workers()
        self.scheduler.recompute()
        self._builder.start_over()
        self._open.clear()
        self.start_worker()

    def fail(self) -> None:
        """Run a step whose result is lost: it is run again."""
        self._send()
        if self._open:
            self._runner.run(self._open[0][1])
            self.scheduler.retry()
            self._builder.start_over()
            self._open.clear()

    def _send(self) -> bool:
        chunks = self.scheduler.schedule()
        if chunks:
            self._open.append((chunks, self._builder.build(chunks)))
        return bool(chunks)

    def step(self) -> None:
        """Send a step, then run the oldest unless another can be sent before."""
        if self._send() and len(self._open) < self._depth:
            return
        chunks, step = self._open.pop(0)
        result = self._runner.run(step)
        self.scheduler.observe(chunks, STEP_S)
        self.scheduler.update(chunks, ResultReader(result, 0))

    def run(self) -> None:
        """Step until all sequences have ended: then no slot is in use."""
        while self.scheduler.has_work:
            self.step()
        assert self.slots.num_free == self.slots.num_slots

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the texts of prompts that come together."""
        sequences = [self.add(prompt) for prompt in prompts]
        self.run()
        return [list(sequence.generated) for sequence in sequences]
