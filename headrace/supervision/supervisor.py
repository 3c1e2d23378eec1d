"""The supervisor: starts every process of the ring, watches them, ends them.

It holds no traffic. Its children die with it however it dies (`process.die_with_parent`). A child
that dies is replaced; one that dies again and again without having served ends the whole server,
which says which and why.

SIGTERM ends it when open requests are answered, SIGINT at once. SIGHUP replaces all processes, one
by one, without a failed request; an engine only where the model has others.
"""

import contextlib
import gc
import logging
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from types import FrameType

import headrace.ipc.sockets  # noqa: F401  # for its copies: all of them have links
from headrace.board.admin_requests import RENEWABLE, STOP, AdminRequests
from headrace.board.board import Board, Seat, Slot, State
from headrace.board.fields import (
    CommonField,
    DetokenizerField,
    EngineField,
    FrontendField,
    TokenizerField,
)
from headrace.board.replacements import is_ready
from headrace.config.chaos import Chaos, parse_chaos
from headrace.config.lora_modules import lora_modules
from headrace.config.process_configs import (
    CrashConfig,
    EngineConfig,
    FetcherConfig,
    FrontendConfig,
    TokenizerConfig,
)
from headrace.errors import ConfigError, HeadraceError, InvalidValue
from headrace.exit_status import CAUSES, FINAL, ExitStatus, ending
from headrace.ipc.adapter_registry import AdapterRegistry
from headrace.ipc.arena import Arena
from headrace.ipc.recorder import prepare_folder
from headrace.runtime.placed_address import PlacedAddress
from headrace.runtime.process import DRAIN, Process, spawn
from headrace.runtime.run_directory import RunDirectory
from headrace.runtime.stack_dumps import write_last
from headrace.supervision.child_configs import ChildConfigs
from headrace.supervision.crash_reports import CrashReports, crash_directory
from headrace.supervision.engine_files import EngineFiles
from headrace.supervision.engine_groups import (
    EngineGroup,
    check_groups,
    check_key,
    load_policy,
    write_places,
)
from headrace.supervision.engine_seats import FIRST_TIME, EngineSeats
from headrace.supervision.listeners import Listeners
from headrace.supervision.model_loads import ModelLoads
from headrace.supervision.orphans import reap_orphans
from headrace.supervision.renewals import Renewals
from headrace.supervision.seated_process import SeatedProcess
from headrace.supervision.seats import seats_of
from headrace.supervision.watchdog import HangWatchdog, MemoryWatchdog, SpinWatchdog, Watchdog
from headrace.system.file_limit import raise_file_limit
from headrace.system.machine import memory_limit
from headrace.system.procfs import busy_seconds, own_bytes, resident_bytes

TOLD_S = 4.0  # after SIGTERM; a process that is still there gets it again, since it may get lost
STOP_S = 5.0  # what is not gone this long after the first SIGTERM is killed
POLL_INTERVAL_S = 0.5  # of heartbeats
STARTUP_POLL_INTERVAL_S = 0.05  # of the board, while the server starts or drains
WAKEUP_BYTES = 4096
ENGINES_CHILDREN = ("worker", "vision", "kv_store")  # which the engine starts
OF_GATEWAY = ("frontend", "tokenizer", "detokenizer")  # in whose seats a remote engine is
FETCHED_BODIES = 4  # of the largest size, that may be fetched and not taken

log = logging.getLogger(__name__)


class ChildDied(HeadraceError):
    """A process of the ring ended on its own. `why` are its last words."""

    def __init__(self, seat: Seat, code: int, why: str = "") -> None:
        self.how = f"{ending(code)}{f' ({why})' if why else ''}"
        super().__init__(f"{seat} {self.how}")
        self.exit_status = ExitStatus(code) if code in CAUSES else ExitStatus.HOPELESS


class Supervisor:
    """One server: its board, its run directory, its children.

    Without `listeners` there are no frontends: an embedding process takes their seat.
    """

    def __init__(
        self,
        groups: Sequence[EngineGroup],
        listeners: Listeners | None = None,
        api_keys: Sequence[str] = (),
        admin_key: str | None = None,
    ) -> None:
        check_groups(groups)
        check_key(groups[0].config)
        policy = load_policy(groups, memory_limit())
        configs = [group.config for group in groups]
        self._config = config = configs[0]
        self._listeners = listeners
        takes_images = groups[0].card.takes_images
        may_grow = admin_key is not None
        seats = seats_of(
            *configs,
            takes_images=takes_images,
            handles_gets=listeners is not None,
            may_grow=may_grow,
        )
        raise_file_limit(len(seats))
        self._record = None if config.record is None else prepare_folder(config.record)
        self.board = Board.create(seats)
        write_places(self.board, configs, may_grow and not takes_images, policy.num_first)
        num_regions, region_bytes = config.preprocess_procs, config.image_memory_bytes
        self._arena = Arena.create(num_regions, region_bytes) if takes_images else None
        fetched_bytes = FETCHED_BODIES * config.max_body_bytes
        fetches = Seat("fetcher", 0) in seats
        self._fetched = Arena.create(1, fetched_bytes) if fetches else None
        self._files = EngineFiles(self.board, configs, takes_images)
        self._directory = RunDirectory()
        self.run_dir = self._directory.path
        registry = AdapterRegistry(self.run_dir, config.lora_dir)
        for module in lora_modules(config.lora_modules):
            try:
                registry.add(module.name, module.path)
            except InvalidValue as error:
                raise ConfigError(f"--lora-modules {module.name}: {error}") from None
        self._children: list[SeatedProcess] = []
        self._admin_requests = AdminRequests(self.board)
        self._engine_seats = EngineSeats(self.board, config.drain_timeout)
        self._loads = ModelLoads(self.board, groups, self._engine_seats, policy)
        self._is_up = False  # all have been ready
        self._hang_watchdog: Watchdog = HangWatchdog(config.watchdog_timeout)
        self._limit_watchdogs: tuple[Watchdog, ...] = (
            MemoryWatchdog(memory_limit(), resident_bytes, own_bytes),
            SpinWatchdog(busy_seconds),
        )
        crash = CrashConfig.of(config, crash_directory(config.crash_dir, os.environ))
        self._crash_reports = CrashReports(crash, self.board)
        sockets = None if listeners is None else listeners.sockets
        self._wakeup_r, wakeup_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._configs = ChildConfigs(
            groups=groups,
            demand_fd=wakeup_w,
            run_dir=self.run_dir,
            started_at=int(time.time()),
            listen_fds=None if sockets is None else [socket.fileno() for socket in sockets],
            api_keys=api_keys,
            admin_keys=() if admin_key is None else (admin_key,),
            arena=self._arena,
            fetched=self._fetched,
            board=self.board,
            files=self._files,
            engine_seats=self._engine_seats,
            crash=crash,
        )
        self._chaos = Chaos(parse_chaos(config.chaos), random.Random())
        self._selector = selectors.DefaultSelector()
        signal.set_wakeup_fd(wakeup_w, warn_on_full_buffer=False)
        self._stopping = False
        self._drain_until: float | None = None  # requests may end until then
        self._renewals = Renewals(self.board, self._engine_seats)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if not os.isatty(sys.stderr.fileno()):  # else it is the end of the terminal
            signal.signal(signal.SIGHUP, self._on_hangup)
        self._selector.register(self._wakeup_r, selectors.EVENT_READ)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        may_drain = number == signal.SIGTERM and self._is_up and self._listeners is not None
        if not may_drain or self._drain_until is not None:
            self._stopping = True
            return
        self._drain()

    def _on_hangup(self, _number: int, _frame: FrameType | None) -> None:
        for role in RENEWABLE:
            self._renew_all(role)

    def _drain(self) -> None:
        """Stop when open requests are answered."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._config.drain_timeout

    def _renew_all(self, role: str) -> None:
        """Have the processes of a role replaced, each at its turn."""
        for child in self._children:
            if child.seat.role == role:
                self._renewals.add(child)

    def _apply_admin_requests(self) -> None:
        """Execute admin requests."""
        for what in self._admin_requests.take():
            log.info("admin request: %s", what if what == STOP else f"restart {what}")
            if what == STOP:
                self._drain()
            else:
                self._renew_all(what)

    def stop_with(self, fd: int) -> None:
        """End the server when `fd` becomes readable."""
        self._selector.register(fd, selectors.EVENT_READ)

    def run(self, on_ready: Callable[[], None], on_progress: Callable[[float], None]) -> None:
        """Serve until a signal; then, and when a child dies, end every process.

        Raises:
            ChildDied: a process ended on its own.
        """
        try:
            self._start()
            while not self._stopping and not self._all_ready():
                self._wait(STARTUP_POLL_INTERVAL_S)
                self._kill_unhealthy()
                on_progress(self._progress())
            self._is_up = True
            if not self._stopping:
                on_ready()
            while not self._stopping and not self._is_drained():
                self._wait(min(self._restart(), self._interval_s))
                self._kill_unhealthy()
                self._inject_faults()
                self._apply_admin_requests()
                for engine in self._loads.look():
                    self._add_engine(engine)
                self._renewals.go_on()
                self._end_leaving()
        finally:
            self._stop()

    @property
    def _interval_s(self) -> float:
        """How long to wait between looks at the board."""
        if self._drain_until is not None or self._engine_seats.are_changing:
            return STARTUP_POLL_INTERVAL_S
        return POLL_INTERVAL_S if self._loads.are_settled else STARTUP_POLL_INTERVAL_S

    def _start(self) -> None:
        gc.freeze()  # what its copies share with it stays shared while they collect
        # The engine first: its workers take longest, and start once it has imported its modules.
        for slot in sorted(self.board.slots, key=lambda slot: slot.seat.role != "engine"):
            role = slot.seat.role
            if role in self._roles_elsewhere:
                continue
            if self.board.is_vacant(slot):
                continue
            child = SeatedProcess(slot.seat, *self._spawn(slot.seat, is_copy=True))
            self._children.append(child)
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _spawn(self, seat: Seat, is_copy: bool = False) -> tuple[Process, int]:
        """Start the process of a seat; return it and its pidfd.

        Raises:
            OSError: the system is short of processes, files or memory.
        """
        if seat.role == "engine":
            self._engine_seats.take(seat.index)
        config = self._configs.of(seat)
        fds = [config.listen_fd] if isinstance(config, FrontendConfig) else []
        if self._arena is not None and isinstance(config, TokenizerConfig | EngineConfig):
            fds.append(self._arena.fd)
        if isinstance(config, EngineConfig):
            fds += config.cache_fds
            fds += config.prefix_fds
            fds += config.store_tiers.fds if config.store_tiers is not None else ()
        if isinstance(config, TokenizerConfig):
            fds += [*chain.from_iterable(config.prefix_fds.values()), config.demand_fd]
        if self._fetched is not None and isinstance(config, TokenizerConfig | FetcherConfig):
            fds.append(self._fetched.fd)
        process = spawn(
            seat,
            config,
            self.board,
            self._config.log_level,
            tuple(fds),
            self._record,
            log_format=self._config.log_format,
            is_copy=is_copy,
        )
        try:
            return process, os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            process.stacks.close()
            raise

    def _is_drained(self) -> bool:
        """Whether the server is to stop, and no request is open any more."""
        if self._drain_until is None:
            return False
        num_open = 0
        for child in self._children:
            slot = self.board.slot(child.seat.role, child.seat.index)
            if child.seat.role == "frontend" and slot[CommonField.STATE] == State.READY:
                if not slot[FrontendField.IS_CLOSED]:
                    child.process.send_signal(DRAIN)
                num_open += slot[FrontendField.OPEN_REQUESTS] + (not slot[FrontendField.IS_CLOSED])
        return num_open == 0 or time.monotonic() >= self._drain_until

    def _kill_unhealthy(self) -> None:
        """Kill each process that a watchdog has a verdict on; another takes its seat."""
        now_ns = time.monotonic_ns()
        living = [child.seat for child in self._children if child.start_at is None]
        slots = [slot for slot in self.board.slots if slot.seat in living]
        verdicts = self._hang_watchdog.check(slots, now_ns)
        living_engines = [seat.index for seat in living if seat.role == "engine"]
        slots += [  # their heartbeats are watched by their engine
            slot
            for role in ENGINES_CHILDREN
            for slot in self.board.of(role)
            if (engine := self.board.engine_of(slot)) and engine.seat.index in living_engines
        ]
        for watchdog in self._limit_watchdogs:
            verdicts += watchdog.check(slots, now_ns)
        for seat, reason in verdicts:
            slot = self.board.slot(seat.role, seat.index)
            log.warning("%s %s; killing it", seat, reason)
            write_last(slot)
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot[CommonField.PID], signal.SIGKILL)

    def _end_leaving(self) -> None:
        """End engines that leave and have no requests any more, or have had the time for them."""
        due = self._engine_seats.due()
        for child in list(self._children):
            if child.is_engine and child.seat.index in due:
                if child.start_at is None:
                    if due[child.seat.index] == FIRST_TIME:  # later there may be a successor's
                        self._withdraw(child.seat)
                    child.process.send_signal(signal.SIGTERM)
                else:  # it has died meanwhile
                    self._give_up(child)

    def _withdraw(self, seat: Seat) -> None:
        """Have Ray place another engine, if it has placed the one of a seat that is renewed.

        One that loads its model goes on.
        """
        slot = self.board.slot(seat.role, seat.index)
        has_loaded = is_ready(slot) and slot[EngineField.IS_PLACED]
        if has_loaded and not self._engine_seats.is_given_up(seat.index):
            PlacedAddress(self.run_dir, f"engine {seat.index}").write(None)

    def _add_engine(self, index: int) -> None:
        """Start an engine in a vacant seat. If it cannot start, the seat is vacant again."""
        seat = Seat("engine", index)
        try:
            child = SeatedProcess(seat, *self._spawn(seat), is_new=True)
        except OSError as error:
            log.error("%s cannot be started: %s", seat, error)
            self._engine_seats.vacate(index)
            self._loads.fail(index, error)
            return
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _may_lack(self, child: SeatedProcess) -> bool:
        """Whether the server goes on without an engine: a new one, or one that loads on demand."""
        is_on_demand = self._is_up and self._config.max_loaded_models is not None
        return child.is_new or (child.is_engine and is_on_demand)

    def _give_up(self, child: SeatedProcess) -> None:
        """Have no other engine follow one that is leaving and has died."""
        self._engine_seats.end(child.seat.index, 0)
        self._vacate(child)

    def _vacate(self, child: SeatedProcess) -> None:
        """Give up an engine that has ended, its seat and its memory."""
        self._children.remove(child)
        self._engine_seats.vacate(child.seat.index)
        self._files.clear(child.seat.index)
        self._renewals.forget(child)

    def _inject_faults(self) -> None:
        """Inject the faults of --chaos."""
        for rule in self._chaos.due(time.monotonic()):
            alive = [s for s in self.board.of(rule.role) if s[CommonField.STATE] == State.READY]
            if alive:
                victim = random.choice(alive)
                log.warning("chaos: %s gets %s", victim.seat, rule.signal.name)
                victim[CommonField.HARMED_PID] = victim[CommonField.PID]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim[CommonField.PID], rule.signal)

    def _restart(self) -> float:
        """Start replacements that are due; return in how many seconds the next one is."""
        now = time.monotonic()
        dead = [child for child in self._children if child.start_at is not None]
        for child in dead:
            assert child.start_at is not None
            if child.start_at <= now:
                self._start_another(child)
        waits = [child.start_at - now for child in dead if child.start_at is not None]
        return min(waits, default=POLL_INTERVAL_S)

    def _start_another(self, child: SeatedProcess) -> None:
        """Start a process in a seat that is to have one; later, where the system lacks a resource.

        Raises:
            ChildDied: the resource was lacking too often in a row.
        """
        child.start_at = None
        if child.is_engine and self._engine_seats.is_given_up(child.seat.index):
            self._give_up(child)
            return
        try:
            child.process, child.pidfd = self._spawn(child.seat)
        except OSError as error:
            delay_s = child.restarts.delay_s()
            if delay_s is None:
                if self._may_lack(child):
                    self._vacate(child)
                    self._loads.fail(child.seat.index, error)
                    return
                raise ChildDied(child.seat, ExitStatus.SHORT_OF, str(error)) from None
            log.warning("%s cannot be started: %s; trying again", child.seat, error)
            child.start_at = time.monotonic() + delay_s
            return
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    @property
    def _roles_elsewhere(self) -> tuple[str, ...]:
        """The roles whose seats other processes than this one's children have or start."""
        if self._config.engine_listen is not None:
            return *ENGINES_CHILDREN, *OF_GATEWAY
        return ENGINES_CHILDREN if self._listeners is not None else (*ENGINES_CHILDREN, "frontend")

    def _all_ready(self) -> bool:
        """Whether all serve. Engines of other machines come later, where one serves."""
        engines = self.board.occupied("engine")
        may_miss = any(slot[CommonField.STATE] == State.READY for slot in engines)
        return all(
            slot[CommonField.STATE] == State.READY
            for slot in self.board.occupied()
            if not (may_miss and self.board.is_remote(slot))
        )

    def _progress(self) -> float:
        """Return the share of start-up work done: the worker's, which is nearly all of it."""
        workers = self.board.occupied("worker")
        return min((s[CommonField.PROGRESS] for s in workers), default=1000) / 1000

    def _wait(self, timeout_s: float) -> None:
        """Wait for a signal or the death of a child."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                if key.fd == self._wakeup_r:  # a signal, which has been handled, or a demand
                    os.read(self._wakeup_r, WAKEUP_BYTES)
                else:
                    self._stopping = True
                continue
            child: SeatedProcess = key.data
            code = child.process.wait()
            if not self._stopping:
                self._handle_exit(child, code)
        reap_orphans({child.process.pid for child in self._children})

    def _handle_exit(self, child: SeatedProcess, code: int) -> None:
        """Have a child that has died replaced, but for an engine that leaves for good.

        Raises:
            ChildDied: it gave up, died before all were up, or too often in a row.
        """
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        slot = self.board.slot(child.seat.role, child.seat.index)
        is_refused = code in FINAL and self._is_elsewhere(slot)  # as its predecessor, maybe
        if slot[CommonField.STATE] == State.READY:
            child.restarts.worked()
            child.is_new = False
        leaving = None
        if child.is_engine:
            leaving = self._engine_seats.end(child.seat.index, code)
            is_wanted = leaving is not None and leaving.told_at is not None
            if leaving is not None and leaving.returns and not is_wanted:
                self._renewals.add_again(child)
        else:
            slot.die()
            is_wanted = self._renewals.has_told(child)
        is_leaving = leaving is not None and not leaving.returns
        delay_s = self._delay_s(child, slot, code)
        death = ChildDied(child.seat, code, slot.exit_reason)
        how = f"was {'ended' if is_leaving else 'replaced'} on request" if is_wanted else death.how
        is_told = is_refused and how == slot.last_death.how
        slot.last_death.record(child.process.pid, how)
        is_given_up = is_leaving or (delay_s is None and self._may_lack(child))
        if (delay_s is not None or is_given_up) and not is_told:
            then = "its seat is vacant" if is_given_up else "starting another"
            level = logging.INFO if is_wanted else logging.WARNING
            log.log(level, "%s %s; %s", child.seat, how, then)
        if self._is_up and not is_wanted and not is_refused:
            hands = {
                "tokenizer": TokenizerField.AT_HAND,
                "detokenizer": DetokenizerField.RESPONSE_AT_HAND,
            }
            role = child.seat.role
            in_progress = [slot[hands[role]]] if role in hands else []
            self._crash_reports.make(slot, ending(code), child.process.stacks.take(), in_progress)
        child.process.stacks.close()
        slot.exit_reason = ""
        if is_given_up:
            self._vacate(child)
            if not is_leaving:
                self._loads.fail(child.seat.index)
            return
        if delay_s is None:
            raise death
        child.start_at = time.monotonic() + delay_s

    def _delay_s(self, child: SeatedProcess, slot: Slot, code: int) -> float | None:
        """Note a death; return when another is to start, or None where that is hopeless."""
        if self._is_elsewhere(slot):
            return child.restarts.patient_delay_s()
        return None if code in FINAL or not self._is_up else child.restarts.delay_s()

    def _is_elsewhere(self, slot: Slot) -> bool:
        """Whether a process rests on other machines, whose faults are not this server's end."""
        return self.board.is_remote(slot) or (slot.seat.role == "placement" and self._is_up)

    def _stop(self) -> None:
        """End all children and leave nothing behind; the telemetry process takes all reports."""
        reporting = [child for child in self._children if child.seat.role == "telemetry"]
        self._end([child for child in self._children if child not in reporting])
        self._end(reporting)
        if self._listeners is not None:
            self._listeners.close()
        self._crash_reports.close()
        self._directory.remove()

    def _end(self, children: Sequence[SeatedProcess]) -> None:
        """End children, politely for `STOP_S` seconds."""
        left = self._terminate(children, TOLD_S)
        for child in self._terminate(left, STOP_S - TOLD_S):
            # A process that does not serve yet may miss the signal, and leaves nothing behind.
            level = logging.WARNING if self._is_up else logging.DEBUG
            log.log(level, "%s does not end; killing it", child.seat)
            child.process.kill()
            child.process.wait()

    def _terminate(self, children: Sequence[SeatedProcess], seconds: float) -> list[SeatedProcess]:
        """Send children SIGTERM; return those that have not ended after some seconds."""
        for child in children:
            child.process.terminate()
            child.process.send_signal(signal.SIGCONT)  # a stopped process takes SIGTERM then
        deadline = time.monotonic() + seconds
        left = []
        for child in children:
            try:
                child.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                left.append(child)
        return left
