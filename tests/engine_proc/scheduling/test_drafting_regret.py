"""On a machine whose steps vary, drafts make nearly what the best fixed number of them would."""

import math
import random
from array import array
from collections.abc import Callable
from itertools import product

from scheduler_rig import make_sequence

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.draft_model import DraftModel
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.scheduling.speculation import DRAFTS_PER_STEP, Speculation
from headrace.engine_proc.step.draft_step import build_draft_step
from headrace.engine_proc.step.step_builder import build_step
from headrace.ipc.messages import request_id
from headrace.ipc.token_logprobs import ROW
from headrace.ipc.worker_messages import Step, StepResult

NUM_TOKENS = 800  # of each sequence
WARM_UP = 200  # of them, while acceptance and costs are learned
VOCAB_SIZE = 1 << 20
DRAFT_COST = 0.2  # of the draft model's steps, as a share of the model's
Costs = Callable[[int], float]


def memory_bound(num_rows: int) -> float:
    return 1.0 + 0.01 * num_rows


def in_tiles(num_rows: int) -> float:
    """Return a cost as on a CPU with tiles: few rows one by one, others in tiles of 16."""
    if num_rows < 7:
        return 1.0 + 0.1 * (num_rows - 1)
    return 1.4 + 0.4 * -(-num_rows // 16)


def compute_bound(num_rows: int) -> float:
    return 0.2 + 0.1 * num_rows


ROUNDS = 4
COSTS = (memory_bound, in_tiles, compute_bound)


class Machine:
    """A model whose texts count upwards, and a draft model that is right at times.

    Steps take what they cost, more or less, at a pace that changes. Some take far longer.

    Args:
        noise: of a step's time, in logarithms.
    """

    def __init__(self, costs: Costs, acceptance: float, noise: float = 0.07) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._noise = noise
        self._dice = random.Random(0)
        self._pace = 0.0
        self.work = 0.0  # what all steps have cost, without the machine's noise

    def run(self, step: Step) -> StepResult:
        tokens = array("i", step.token_ids)
        drawn, logprobs = array("i"), b""
        for row in array("i", step.logit_rows):
            is_right = not step.is_draft or self._dice.random() < self._acceptance
            drawn.append(tokens[row] + 1 if is_right else 0)
            logprobs += ROW.pack(math.log(0.5), 1) if step.is_draft else b""
        return StepResult(drawn.tobytes(), logprobs)

    def seconds(self, step: Step) -> float:
        cost = self._costs(step.num_tokens) * (DRAFT_COST if step.is_draft else 1.0)
        self.work += cost
        self._pace += self._dice.gauss(0, 0.3 * self._noise) - 0.01 * self._pace
        noise = self._dice.lognormvariate(self._pace, self._noise)
        return 0.03 * cost * noise * (5 if self._dice.random() < 0.03 else 1)


def scheduler_of(speculation: Speculation, pool: PagePool, num_sequences: int) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs=num_sequences, max_num_batched_tokens=512)
    return Scheduler(pool, limits, speculation=speculation)


def add(scheduler: Scheduler, first_tokens: list[list[int]], num_tokens: int) -> None:
    """Add sequences of some prompts, of which each is to get `num_tokens`."""
    for number, prompt in enumerate(first_tokens):
        id = request_id(0, prompt[0] * 64 + number)
        scheduler.add(make_sequence(prompt, num_tokens, id, stop_token_ids=[]))


def run_step(scheduler: Scheduler, machine: Machine) -> int:
    """Run the next step; return the tokens that it has told."""
    chunks = scheduler.schedule()
    step = build_draft_step(chunks) if chunks[0].is_draft else build_step(chunks)
    outcome = ResultReader(machine.run(step), 0)
    scheduler.observe(chunks, machine.seconds(step))
    if step.is_draft:
        scheduler.take_drafts(chunks, outcome)
        return 0
    return sum(len(news.tokens) for news in scheduler.update(chunks, outcome))


def rate(machine: Machine, num_sequences: int, speculation: Speculation, pool: PagePool) -> float:
    """Return the tokens per cost of sequences that all begin at once, from the warm-up on."""
    scheduler = scheduler_of(speculation, pool, num_sequences)
    add(scheduler, [[1000 * (number + 1)] for number in range(num_sequences)], NUM_TOKENS)
    num_told, num_before, work_before = 0, 0, 0.0
    while len(scheduler.running) == num_sequences or not num_told:
        num_told += run_step(scheduler, machine)
        if num_told < num_sequences * WARM_UP:
            num_before, work_before = num_told, machine.work
    return (num_told - num_before) / (machine.work - work_before)


def work_of_rounds(speculation: Speculation, num_sequences: int, pool: PagePool) -> float:
    """Return what rounds of sequences cost whose prompts come at once, but for the first round."""
    machine, before = Machine(compute_bound, 0.9), 0.0
    scheduler = scheduler_of(speculation, pool, num_sequences)
    for number in range(ROUNDS):
        prompts = [
            list(range(start, start + 60 + 10 * place))
            for place in range(num_sequences)
            for start in [1000 * (number * num_sequences + place + 1)]
        ]
        add(scheduler, prompts, 64)
        while scheduler.running or scheduler.waiting:
            run_step(scheduler, machine)
        before = before or machine.work
    return machine.work - before


def best_rate(costs: Costs, acceptance: float, num_sequences: int) -> float:
    """Return the rate of the best fixed number of drafts."""
    return max(
        num_sequences
        * sum(acceptance**place for place in range(count + 1))
        / (costs(num_sequences * (count + 1)) + count * DRAFT_COST * costs(num_sequences))
        for count in range(min(15, DRAFTS_PER_STEP // num_sequences) + 1)
    )


def test_drafts_make_nearly_what_the_best_number_of_them_would() -> None:
    shares = []
    for costs, acceptance, count in product(COSTS, (0.3, 0.8), (1, 8)):
        pool = PagePool(4096, 16)
        speculation = Speculation(DraftModel(pool, VOCAB_SIZE))
        reached = rate(Machine(costs, acceptance), count, speculation, pool)
        where = f"{costs.__name__}, {acceptance} of drafts right, {count} sequences"
        assert reached >= 0.98 * count / costs(count), f"slower than without drafts: {where}"
        shares.append(reached / best_rate(costs, acceptance, count))
    assert sum(shares) / len(shares) >= 0.96, shares


def test_drafts_slow_nothing_where_times_of_steps_vary_much() -> None:
    pool = PagePool(4096, 16)
    for num_sequences in (8, 32):
        machine = Machine(compute_bound, 0.6, noise=0.2)
        reached = rate(machine, num_sequences, Speculation(DraftModel(pool, VOCAB_SIZE)), pool)
        assert reached >= 0.97 * num_sequences / compute_bound(num_sequences)


def test_prompts_beside_make_drafts_no_cheaper() -> None:
    pool = PagePool(4096, 16)
    drafted = work_of_rounds(Speculation(DraftModel(pool, VOCAB_SIZE)), 8, pool)
    assert drafted <= 1.03 * work_of_rounds(Speculation(max_length=0), 8, PagePool(4096, 16))
