"""An engine between its links, with scripted workers."""

import threading
from array import array
from pathlib import Path
from typing import Protocol

from engine_configs import engine_config

from headrace.board.board import Board, Seat
from headrace.engine_proc.child_processes.child_process import WorkerDied
from headrace.engine_proc.engine_core import EngineCore
from headrace.engine_proc.grammars import MatcherQueue
from headrace.engine_proc.images.encoder_cache import EncoderCache
from headrace.engine_proc.images.encoder_queue import EncoderQueue, Losses
from headrace.engine_proc.kv_cache.cache_table import CacheTable
from headrace.engine_proc.kv_cache.host_tier import CachePools, HostTier
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.main import make_pool, make_scheduler, make_slots
from headrace.engine_proc.page_copies import PageCopies
from headrace.engine_proc.request_io.detokenizer_links import DetokenizerLinks
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.exit_status import ExitStatus
from headrace.ipc.messages import (
    GenerateRequest,
    Sampling,
    StepOutput,
    ToDetokenizer,
    ToEngine,
    request_id,
)
from headrace.ipc.sockets import Inbox, Outbox, address
from headrace.ipc.token_logprobs import ROW
from headrace.ipc.worker_messages import (
    CacheLayout,
    Encode,
    Encoded,
    Step,
    StepFailed,
    StepResult,
    WorkerReady,
)

WAIT_MS = 60_000
TICK_S = 1e-6
READY = WorkerReady(num_pages=16, page_tokens=16)
FIRST = request_id(0, 1)
IMAGE_TOKEN = 6
MAX_NUMBERS = 100  # of images that are encoded together


class Sevens:
    """Workers whose model draws 7, with probability 1; those of `lives` steps die in the next."""

    def __init__(self, lives: int = 100, is_chaos: bool = False) -> None:
        self.lives = lives
        self.cache_id = b""  # pages die with them
        self.is_chaos = is_chaos
        self.masks = GrammarBitmask.create(4, 8)
        self.events: list[str] = []
        self.steps: list[Step] = []  # without a result
        self.blamed: tuple[list[int], bool] = [], False

    def start(self, step: Step) -> None:
        self.steps.append(step)
        self.events.append("start")

    def masks_written(self) -> None:
        self.events.append("masks")

    def are_ready(self) -> bool:
        return self.lives >= 0

    def check(self) -> None:
        if not self.lives:
            raise WorkerDied("worker 0 died", is_chaos=self.is_chaos)

    def replace(self, death: WorkerDied, requests: list[int], is_explained: bool) -> None:
        self.events.append(str(death))
        self.blamed = requests, is_explained
        self.lives = -1

    def finish(self, patience_s: float | None = None) -> StepResult | StepFailed:
        self.check()
        self.lives -= 1
        self.events.append("finish")
        self.step = self.steps.pop(0)
        num_rows = len(self.step.logit_rows) // 4
        return StepResult(array("i", [7] * num_rows).tobytes(), ROW.pack(0, 1) * num_rows)


class Small(Sevens):
    """The same with memory for steps of so many tokens; or they die of those that have more."""

    def __init__(self, num_tokens: int, dies: bool = False) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.dies = dies
        self.sizes: list[int] = []
        self.has_failed = False

    def finish(self, patience_s: float | None = None) -> StepResult | StepFailed:
        self.sizes.append(len(self.steps[0].token_ids) // 4)
        if self.sizes[-1] <= self.num_tokens and not self.has_failed:
            return super().finish()
        if self.dies:
            raise WorkerDied("no memory", code=ExitStatus.SHORT_OF)
        self.has_failed = True
        del self.steps[0]
        return StepFailed("no memory")

    def resume(self) -> None:
        assert not self.steps
        self.has_failed = False
        self.events.append("resume")


class Sight(Protocol):
    """The engine's requests to a vision worker."""

    def take(self, images: EncoderQueue) -> Losses: ...

    def ask(self, images: EncoderQueue, fingerprint: str = "") -> None: ...


class Eyes:
    """A vision worker that answers on command."""

    def __init__(self) -> None:
        self.asked: list[Encode] = []
        self.answer: Encoded | None = None

    def take(self, images: EncoderQueue) -> Losses:
        answer, self.answer = self.answer, None
        return Losses() if answer is None else images.take(answer)

    def ask(self, images: EncoderQueue, fingerprint: str = "") -> None:
        batch = images.next_batch(MAX_NUMBERS)
        if batch is not None:
            self.asked.append(batch)


class Slow:
    """A compiler that does nothing until it is let, and then what a `MatcherQueue` needs of it."""

    is_stuck = False

    def __init__(self) -> None:
        self.let = threading.Event()

    def compile(self, grammar: str) -> "Slow":
        assert self.let.wait(WAIT_MS / 1000)
        if grammar == "wrong":
            raise ValueError("not a grammar")
        return self

    def deep_copy(self) -> "Slow":
        return self

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""

    def consume_tokens(self, tokens: list[int]) -> None: ...

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None: ...


class Rig:
    """An engine between a tokenizer's outbox and two detokenizers' inboxes."""

    def __init__(
        self,
        run_dir: Path,
        ahead_s: float = 0.0,
        ready: WorkerReady = READY,
        images: EncoderQueue | None = None,
        sight: Sight | None = None,
        **flags: int | str,
    ) -> None:
        self.config = engine_config(run_dir=str(run_dir), **flags)
        seat = Seat("engine", 0)
        seats = [seat, Seat("kv_store", 0), *(Seat("detokenizer", i) for i in range(2))]
        self.board = Board.create(seats)
        self.slot = self.board.slot("engine")
        self.inbox: Inbox[ToEngine] = Inbox(address(str(run_dir), "engine"), ToEngine)
        self.outbox = Outbox(address(str(run_dir), "engine"))
        self.detokenizers: list[Inbox[ToDetokenizer]] = [
            Inbox(address(str(run_dir), "detokenizer", i), ToDetokenizer) for i in range(2)
        ]
        pool = make_pool(ready, self.config)
        self.released: list[int] = []  # places in the arena
        self.images = images or EncoderQueue(
            EncoderCache(32), IMAGE_TOKEN, lambda tensor: self.released.append(tensor.offset)
        )
        self.host = PagePool(ready.num_host_pages, ready.page_tokens)
        tier, slots = None, make_slots(ready, CacheTable(ready.num_states))
        if ready.num_host_pages:
            host = CachePools(self.host, StateSlots(ready.num_host_states))
            sizes = ready.num_host_pages, ready.num_host_states
            layout = CacheLayout(*sizes, [ready.page_bytes], [ready.state_bytes])
            tier = HostTier(CachePools(pool, slots), host, layout)
        self.scheduler = make_scheduler(pool, ready, self.config, self.images, slots, tier=tier)
        store_slot = self.board.slot("kv_store")
        self.eyes = Eyes()
        self.now = 0.0
        self.links = DetokenizerLinks.of_ring(str(run_dir), 2, self.board, self.slot)
        self.compiler = Slow()
        grammars = MatcherQueue(lambda: self.compiler, [0])  # type: ignore[arg-type,return-value]
        self.engine = EngineCore(
            self.config,
            self.scheduler,
            pool,
            self.links,
            self.slot,
            grammars,
            images=self.images,
            vision=sight or self.eyes,  # type: ignore[arg-type]
            clock=self.clock,
            ahead_s=ahead_s,
            copies=None if tier is None else PageCopies(tier, self.slot, store_slot),
        )
        self.workers = Sevens()

    def clock(self) -> float:
        """Return the time. Each look takes one tick, so steps of one kind take the same time."""
        self.now += TICK_S
        return self.now

    def turn(self) -> list[str]:
        """Run one turn of the engine's loop, with live workers; return their requests."""
        self.workers.events.clear()
        self.engine.run_once(self.workers)  # type: ignore[arg-type]
        self.links.flush()
        return self.workers.events

    def take(
        self, *messages: ToEngine, prompt: tuple[int, ...] = (1, 2, 3), ids: tuple[int, ...] = ()
    ) -> None:
        """Send messages to the engine and let it take them."""
        for message in messages:
            bulk = array("I", prompt) if isinstance(message, GenerateRequest) else array("Q", ids)
            self.outbox.send(message, bulk.tobytes())
            assert self.inbox._socket.poll(WAIT_MS)
            self.engine.receive(self.inbox)
        self.links.flush()

    def step(self) -> list[str]:
        """Run a step; return the worker's result."""
        worker = Sevens()
        self.engine.step(worker)  # type: ignore[arg-type]
        self.links.flush()
        return worker.events

    def heard(self, detokenizer: int = 0) -> tuple[StepOutput, list[int]]:
        """Return the next message to a detokenizer."""
        received = self.detokenizers[detokenizer].receive(WAIT_MS)
        assert received is not None
        return received[0], list(array("I", bytes(received[1])))

    def close(self) -> None:
        for link in (self.inbox, self.outbox, *self.detokenizers, self.links):
            link.close()


def generate(id: int = FIRST, detokenizer: int = 0, **options: object) -> GenerateRequest:
    sampling = Sampling(logprobs=0, **options)  # type: ignore[arg-type]
    return GenerateRequest(id, detokenizer, 2, sampling, [], b"plan %d" % id)
