"""The engine's client of the KV store: sends one message at a time, and replaces a store that dies.

Without a store, between a death and the replacement, all prompts are computed.
"""

import logging
import time
from collections.abc import Callable

from headrace.config.process_configs import EngineConfig, KvStoreConfig
from headrace.engine_proc.child_processes.child_process import ChildProcess, WorkerDied
from headrace.engine_proc.kv_cache.page_fetcher import PageFetcher
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.ipc.page_digests import DIGEST_BYTES
from headrace.ipc.prefix_index import PrefixIndex
from headrace.ipc.worker_messages import (
    Drain,
    Drained,
    FromStore,
    OpenStore,
    StoreReady,
    ToStore,
)
from headrace.runtime.process import Context
from headrace.supervision.crash_reports import CrashReports
from headrace.supervision.restart_backoff import RestartBackoff

MIN_PAGE_TOKENS = 16  # of any pool
MESSAGE_BYTES = 4096  # beside the digests
WAIT_S = 0.2  # between looks at whether a silent store is alive
STABLE_S = 10.0  # one that has served so long dies for the first time
RETRY_S = 60.0  # until the next start after too many deaths in a row: a server works without one
PIECE_S = 0.05  # that the store keeps for; requests wait as long
DRAIN_S = 3.0  # the supervisor kills the engine after 5

log = logging.getLogger(__name__)


class StoreClient:
    """The KV store's process; there is none between a death and the replacement.

    Attributes:
        fingerprint: of its files; "" before it has opened them.
        is_keeping: whether it has not kept all yet that was cached at `keep_all`.
        has_kept_all: whether it has.
    """

    def __init__(
        self, config: EngineConfig, context: Context, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert config.store_tiers is not None
        self._config = config
        self._context = context
        self._clock = clock
        self._restarts = RestartBackoff()
        self._crash_reports = CrashReports(config.crash, context.board)
        self._start_at = 0.0  # while there is none
        self._opening: OpenStore | None = None
        self._fetcher: PageFetcher | None = None
        self.fingerprint = ""
        self._is_ready = False
        self._ready_at = 0.0
        self._is_asked = False  # and has not answered
        self._num_drains = 0
        self.is_keeping = self.has_kept_all = False
        self._child: ChildProcess[ToStore, FromStore] | None = self._start()

    def _start(self) -> ChildProcess[ToStore, FromStore]:
        config, tiers = self._config, self._config.store_tiers
        assert tiers is not None
        num_pages = config.execution.max_model_len // MIN_PAGE_TOKENS + 1
        size = MESSAGE_BYTES + num_pages * (DIGEST_BYTES + 4)
        asks: StepChannel[ToStore] = StepChannel.create(ToStore, size)
        answers: StepChannel[FromStore] = StepChannel.create(FromStore, size, look_us=0)
        store_config = KvStoreConfig(
            execution=config.execution,
            ask_fd=asks.fd,
            answer_fd=answers.fd,
            cache_fds=config.cache_fds,
            tiers=tiers,
        )
        slot = self._context.board.slot("kv_store", self._context.index)
        fds = (*config.cache_fds, *tiers.fds)
        self._is_ready = self._is_asked = self.is_keeping = False
        return ChildProcess(
            self._context, slot, store_config, (asks, answers), fds, config.watchdog_timeout
        )

    def open(self, opening: OpenStore, fetcher: PageFetcher, waits: bool = True) -> None:
        """Have the store open its files. The pool's tables are in shared memory.

        Args:
            waits: until they are open. Else prompts are computed before.

        Raises:
            WorkerDied: it cannot open them, or too many died in a row.
        """
        self._opening, self._fetcher = opening, fetcher
        assert self._child is not None
        self._child.send(opening)
        while waits and not self._is_ready:
            self._context.slot.beat()
            self.poll(WAIT_S)

    @property
    def has_directory(self) -> bool:
        """Whether it keeps pages on disk."""
        tiers = self._config.store_tiers
        return tiers is not None and tiers.directory is not None

    @property
    def is_busy(self) -> bool:
        """Whether any sequence waits for pages, or what is cached is being kept."""
        return self.is_keeping or (self._fetcher is not None and self._fetcher.is_busy)

    def keep_all(self) -> None:
        """Have the store keep all that is cached, piece by piece."""
        self.is_keeping, self.has_kept_all = self._is_ready, False
        self._num_drains += 1

    def stop_keeping(self) -> None:
        """Leave the rest to the store, which keeps it as it goes."""
        self.is_keeping = False

    def enter(self, sequence: Sequence) -> None:
        """Have a queued sequence wait for what the store has of it."""
        if self._is_ready and self._fetcher is not None:
            self._fetcher.enter(sequence)

    def poll(self, wait_s: float = 0.0, may_ask: bool = True) -> None:
        """Take an answer, if one arrives within `wait_s`, and ask for the next.

        Args:
            may_ask: whether pages may be held for sequences that wait.

        Raises:
            WorkerDied: a store could not start.
        """
        if self._child is None:
            if self._clock() >= self._start_at and self._opening is not None:
                self._child = self._start()
                self._child.send(self._opening)
            return
        if self._fetcher is not None:
            self._fetcher.look_at_clock()
        answer = self._child.receive(wait_s)
        if answer is None:
            self._look_after(self._child)
        elif isinstance(answer, StoreReady):
            self._is_ready, self._ready_at = True, self._clock()
            self.fingerprint = answer.fingerprint
        elif isinstance(answer, Drained):
            self._note_drained(answer)
        else:
            self._is_asked = False
            self._restarts.worked()
            self._ask(answer)
            return
        if self._is_ready and not self._is_asked and may_ask:
            self._ask()

    def _note_drained(self, drained: Drained) -> None:
        self._is_asked = False
        self._restarts.worked()
        if self.is_keeping and drained == Drained(self._num_drains, is_all=True):
            self.is_keeping, self.has_kept_all = False, True

    def _ask(self, answer: FromStore | None = None) -> None:
        assert self._fetcher is not None
        message: ToStore | None = self._fetcher.ask(answer)
        if message is None and self.is_keeping:
            message = Drain(self._num_drains, PIECE_S)
        if message is not None and self._child is not None:
            self._child.send(message)
            self._is_asked = True

    def _look_after(self, child: ChildProcess[ToStore, FromStore]) -> None:
        """Schedule the next start, if the process has ended."""
        try:
            child.check()
        except WorkerDied as death:
            child.make_crash_report(self._crash_reports, death, [])
            if death.is_from_outside or (
                self._is_ready and self._clock() - self._ready_at > STABLE_S
            ):
                self._restarts.worked()
            self.stop()
            if death.has_reason:
                self._crash_reports.close()
                raise
            delay_s = self._restarts.delay_s()
            if delay_s is None and not self._ready_at:
                self._crash_reports.close()
                raise
            if delay_s is None:
                delay_s = RETRY_S
            log.warning("%s; starting again%s", death, f" in {delay_s:g} s" if delay_s else "")
            self._start_at = self._clock() + delay_s

    def settle(self) -> None:
        """End all waits, and what is being copied into the workers' memory."""
        while self._is_asked and self._child is not None:
            self._context.slot.beat()
            if self._child.receive(WAIT_S) is not None:
                self._is_asked = False
            else:
                self._look_after(self._child)
        if self._fetcher is not None:
            self._fetcher.cancel()

    def drain(self) -> None:
        """Have the store keep all that is cached, as long as there is time. It ends then."""
        try:
            self.settle()
            if self._child is not None and self._is_ready:
                self._child.send(Drain(self._num_drains + 1, DRAIN_S))
                until = self._clock() + DRAIN_S + WAIT_S
                while (answer := self._child.receive(WAIT_S)) is None and self._clock() < until:
                    self._context.slot.beat()
                    self._child.check()
                if not (isinstance(answer, Drained) and answer.is_all):
                    log.warning("not all cached pages were stored within %g s", DRAIN_S)
        except WorkerDied as death:
            log.warning("%s; what it had not stored is lost", death)
        finally:
            self.stop()

    def stop(self) -> None:
        """End it, if there is one."""
        if self._child is not None:
            self._child.stop()
            self._child = None
        self._is_ready = self._is_asked = self.is_keeping = False
        if self._fetcher is not None:
            self._fetcher.cancel()
        self._clear_index()

    def _clear_index(self) -> None:
        """Have no request come for pages that no store has now; a successor tells of them anew."""
        tiers, opening = self._config.store_tiers, self._opening
        has_memory = opening is not None and not opening.numerics  # else a host tier has it
        if has_memory and tiers is not None and tiers.index_fd is not None:
            PrefixIndex(tiers.index_fd).clear()
