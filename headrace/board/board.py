"""The board: state, heartbeat and metrics of every process, in shared memory.

One memfd, inherited by file descriptor: it has no name, so nothing is left behind however the
server dies. Each process owns one slot and is its only writer. 8-byte aligned stores are atomic on
the supported processors, so readers need no lock. `fields.py` has the words.
"""

import enum
import mmap
import os
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from headrace.board.fields import (
    FIELD_WORDS,
    FIELDS,
    MAX_MODELS,
    TIMER_GAUGE,
    CommonField,
    EngineField,
    Seating,
    WorkerField,
)
from headrace.board.histogram import COUNTS, HISTOGRAM_WORDS, SECONDS, Histogram, Scale
from headrace.board.http_counts import HTTP_WORDS
from headrace.board.last_death import DEATH_WORDS, LastDeath
from headrace.errors import ConfigError

OWN_WORDS = 5632  # of 8 bytes: whole pages, so neighbors never share a cache line
PART_WORDS = 2048  # behind them, of what a process counts for each model but the first
SLOT_WORDS = OWN_WORDS + (MAX_MODELS - 1) * PART_WORDS  # only what is used takes memory
LAST_WORDS = FIELD_WORDS  # here a slot's text begins, 512 bytes
MESSAGES_SENT = LAST_WORDS + 64  # here how many messages it has sent to each frontend
HISTOGRAMS = MESSAGES_SENT + 64  # and here its histograms
LOG_WORDS = 1024
LOG = OWN_WORDS - LOG_WORDS  # here the end of its log: how many bytes there were, and a ring
HTTP = LOG - HTTP_WORDS  # here what it counts of HTTP
MAX_IDS = 64
IDS = HTTP - MAX_IDS  # and here ids of requests that are open
DEATH = IDS - DEATH_WORDS  # and here the last death in its seat
HEARTBEAT_LIMIT_S = 4.0  # older than this is ill; processes beat at least once a second


class State(enum.IntEnum):
    """The lifecycle state of a process."""

    ABSENT = 0
    STARTING = 1
    READY = 2
    DEAD = 3  # written by the supervisor


MAX_FRONTENDS = HISTOGRAMS - MESSAGES_SENT


class Timing(enum.IntEnum):
    """Histograms of a slot: durations or, from PROMPT on, counts."""

    # frontend
    LOOP_LAG = 0  # how late a timer fires
    # A request's way, each span from the end of the one before it.
    ACCEPT = 1  # from the head read until a tokenizer process begins
    PARSE = 2  # JSON, validation, chat template
    TOKENIZE = 3  # waiting for the batch it is encoded in, too
    SUBMIT = 4  # until the engine takes it
    QUEUE = 5  # until its first step
    PREFILL = 6  # until its first token
    RENDER = 7  # until that is text
    WRITE = 8  # until that is handed to the kernel, where the answer streams
    # From the head read, until ...
    FIRST_TOKEN = 9  # the first token is text
    WHOLE = 10  # the last byte is handed to the kernel
    # engine, of each sequence that ran to its end
    WAITED = 11  # until its first step
    PREFILLED = 12  # from there until its first token
    DECODED = 13  # from there until its last
    RAN = 14  # both together
    PER_TOKEN = 15  # DECODED, by each token but the first
    BETWEEN = 16  # from one piece of a text to the next; of all sequences
    PROMPT = 17  # tokens of its prompt
    COMPUTED = 18  # and those of them that no cache had
    GENERATED = 19  # tokens
    MAX_TOKENS = 20  # that it might have had
    PREEMPTED = 21  # how often
    STEP = 22  # tokens computed in a step
    # tokenizer
    N = 23  # sequences of a prompt

    @property
    def scale(self) -> Scale:
        """Unit of the value."""
        return SECONDS if self < Timing.PROMPT else COUNTS


@dataclass(frozen=True)
class Seat:
    """A place for a process: its role, and its index there."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


class Counts:
    """Fields and histograms of a process; with several models, those of one.

    Attributes:
        histograms: by `Timing`.
    """

    def __init__(self, words: "memoryview[int]", seat: Seat, start: int, end: int) -> None:
        """Have histograms between two words."""
        self.seat = seat
        self._words = words
        starts = range(start, end - HISTOGRAM_WORDS + 1, HISTOGRAM_WORDS)
        self.histograms = [
            Histogram(words[start : start + HISTOGRAM_WORDS], span.scale)
            for start, span in zip(starts, Timing, strict=False)
        ]

    def __getitem__(self, field: int) -> int:
        return self._words[field]

    def __setitem__(self, field: int, value: int) -> None:
        self._words[field] = value

    def add(self, field: int, amount: int = 1) -> None:
        """Count; for the slot's owner alone."""
        self._words[field] += amount

    def histogram(self, span: Timing) -> Histogram:
        """Return one of the histograms."""
        return self.histograms[span]


class Slot(Counts):
    """One process's part of the board."""

    def __init__(self, words: "memoryview[int]", seat: Seat) -> None:
        super().__init__(words, seat, HISTOGRAMS, DEATH)
        self._text = words[LAST_WORDS:MESSAGES_SENT].cast("B")
        self._ids = words[IDS:HTTP]
        fields = FIELDS[seat.role]
        gauges = [field for field in (*CommonField, *fields) if field.is_gauge]
        self._gauge_words = [word for field in gauges for word in field.words]
        self._work_words = [
            word for field in fields if field.kind != TIMER_GAUGE for word in field.words
        ]
        self.last_death = LastDeath(words[DEATH:IDS])
        self.http_words = words[HTTP:LOG]  # of `HttpCounts`
        self._log = words[LOG + 1 : OWN_WORDS].cast("B")
        self._parts: dict[int, Counts] = {0: self}

    def of_model(self, model: int) -> Counts:
        """Return what a process that serves several models counts for one; the first has the slot.

        Args:
            model: its place among the server's.
        """
        part = self._parts.get(model)
        if part is None:
            start = OWN_WORDS + (model - 1) * PART_WORDS
            words = self._words[start : start + PART_WORDS]
            part = self._parts[model] = Counts(words, self.seat, FIELD_WORDS, PART_WORDS)
        return part

    @property
    def histogram_words(self) -> "memoryview[int]":
        """The words of all histograms."""
        return self._words[HISTOGRAMS:DEATH]

    def beat(self) -> None:
        """Publish a heartbeat of this process."""
        self._words[CommonField.HEARTBEAT_NS] = time.monotonic_ns()

    def silent_s(self, now_ns: int) -> float:
        """Return for how long nothing has been heard of the process, if ever it was there."""
        return (
            max(now_ns - self[CommonField.HEARTBEAT_NS], 0) / 1e9
            if self[CommonField.STATE]
            else 0.0
        )

    def enter(self, state: State) -> None:
        """Move to `state`."""
        self.beat()
        self._words[CommonField.PID] = os.getpid()
        self._words[CommonField.STATE] = state
        if state == State.READY:
            self.last_death.serve()
        if state == State.STARTING:
            self.add(CommonField.STARTS)
            self[LOG] = 0
            self.open_ids = ()
            self.clear_gauges()

    def die(self) -> None:
        """Count the death of the process; for the supervisor alone.

        A reader that sees the new count sees a process that does not serve, or its successor.
        """
        self[CommonField.STATE] = State.DEAD
        self.add(CommonField.DEATHS)

    def clear_gauges(self) -> None:
        """Reset what tells of a process that has ended."""
        for word in self._gauge_words:
            self._words[word] = 0

    @property
    def work(self) -> list[int]:
        """The role's own fields: while they stay the same, the process gets nothing done."""
        return [self._words[word] for word in self._work_words]

    @property
    def open_ids(self) -> list[int]:
        """The ids of a frontend's open requests, of the oldest where there are many."""
        return [id for id in self._ids.tolist() if id]

    @open_ids.setter
    def open_ids(self, ids: Iterable[int]) -> None:
        some = array("Q", islice(ids, MAX_IDS))
        self._ids[:] = some + array("Q", bytes(8 * (MAX_IDS - len(some))))

    @property
    def exit_reason(self) -> str:
        """Why the process could not continue; "" if it gave no reason."""
        return bytes(self._text).rstrip(b"\0").decode(errors="replace")

    @exit_reason.setter
    def exit_reason(self, text: str) -> None:
        data = text.encode()[: len(self._text)]
        self._text[:] = data.ljust(len(self._text), b"\0")

    def keep_line(self, line: bytes) -> None:
        """Remember a line of the log; the oldest give way. For one thread at a time."""
        size = len(self._log)
        line = line[-size:]
        start = self[LOG] % size
        num_fitting = min(len(line), size - start)
        self._log[start : start + num_fitting] = line[:num_fitting]
        self._log[: len(line) - num_fitting] = line[num_fitting:]
        self[LOG] += len(line)

    @property
    def log_tail(self) -> str:
        """The last lines of the process's log, the first of them maybe cut."""
        end = self[LOG]
        start = end % len(self._log)
        data = bytes(self._log[:start])
        if end > len(self._log):
            data = bytes(self._log[start:]) + data
        return data.decode(errors="replace")

    def unhealthy_reason(self, now_ns: int, since_ns: int = 0) -> str | None:
        """Return why the process does not serve; None is that it does: ready, and heard of.

        Args:
            since_ns: since when the asking process has been awake (`wake_clock.py`). Silence
                before that does not count.
        """
        state = State(self[CommonField.STATE])
        if state != State.READY:
            return f"{self.seat} is {state.name.lower()}"
        patient_until_ns = since_ns + round(HEARTBEAT_LIMIT_S * 1e9)
        if self.silent_s(now_ns) >= HEARTBEAT_LIMIT_S and now_ns >= patient_until_ns:
            return f"{self.seat} has been silent for {self.silent_s(now_ns):.0f} s"
        due_ns = self[EngineField.STEP_DUE_NS] if self.seat.role == "engine" else 0
        if due_ns and now_ns > max(due_ns, patient_until_ns):
            return f"{self.seat} waits for a step that has taken far too long"
        return None

    def healthy(self, now_ns: int) -> bool:
        """Whether the process serves."""
        return self.unhealthy_reason(now_ns) is None


class Board:
    """All slots, in the order of `seats`."""

    def __init__(self, fd: int, seats: list[Seat]) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, len(seats) * SLOT_WORDS * 8)
        words = memoryview(self._map).cast("Q")
        self.slots = [
            Slot(words[i * SLOT_WORDS : (i + 1) * SLOT_WORDS], seat) for i, seat in enumerate(seats)
        ]
        self._by_seat = {slot.seat: slot for slot in self.slots}
        self._by_role: dict[str, list[Slot]] = {}
        for slot in self.slots:
            self._by_role.setdefault(slot.seat.role, []).append(slot)
        self._engines = self._by_role.get("engine", [])
        self._seated: list[Slot] = []
        self._num_seatings = -1  # when they were looked at

    @classmethod
    def create(cls, seats: list[Seat]) -> "Board":
        """Make a zeroed board; children inherit `fd`.

        Raises:
            ConfigError: the system has no shared memory for it.
        """
        try:
            fd = os.memfd_create("headrace-board", os.MFD_CLOEXEC)
            os.ftruncate(fd, len(seats) * SLOT_WORDS * 8)
        except OSError as error:
            raise ConfigError(
                f"the processes cannot share memory: {error.strerror}; look at ulimit -f and -v"
            ) from None
        return cls(fd, seats)

    def slot(self, role: str, index: int = 0) -> Slot:
        """Return the slot of one process."""
        return self._by_seat[Seat(role, index)]

    def of(self, role: str) -> Iterator[Slot]:
        """Yield the slots of all processes of a role, by index."""
        return iter(self._by_role.get(role, ()))

    def engine_of(self, slot: Slot) -> Slot | None:
        """Return the engine that a process belongs to; None of one that serves all engines."""
        match slot.seat.role:
            case "engine":
                return slot
            case "worker":
                return self.slot("engine", slot[WorkerField.ENGINE])
            case "kv_store" | "vision":
                return self.slot("engine", slot.seat.index)
            case _:
                return None

    @property
    def num_models(self) -> int:
        """Number of models that the server has."""
        return 1 + max([slot[EngineField.MODEL] for slot in self._engines], default=0)

    def parts_of(self, slot: Slot) -> list[Counts]:
        """Return the counts of a process by model; those of one model's process are its own."""
        if self.engine_of(slot) is not None:
            return [slot]
        return [slot.of_model(model) for model in range(self.num_models)]

    def is_remote(self, slot: Slot) -> bool:
        """Whether a slot is of an engine on another machine."""
        return slot.seat.role == "engine" and slot[EngineField.IS_REMOTE] == 1

    def replicas_of(self, engine: Slot) -> list[Slot]:
        """Return the engines of an engine's model, itself among them."""
        model = engine[EngineField.MODEL]
        return [slot for slot in self.of("engine") if slot[EngineField.MODEL] == model]

    def is_vacant(self, slot: Slot) -> bool:
        """Whether a slot is of an engine that has left its seat, or of such an engine's child."""
        engine = self.engine_of(slot)
        if engine is None or engine[EngineField.SEATING] != Seating.VACANT:
            return False
        return engine[CommonField.STATE] not in (State.STARTING, State.READY)

    def occupied(self, role: str | None = None) -> list[Slot]:
        """Return the slots of a role, or all, without vacant ones."""
        slots = self.slots if role is None else self.of(role)
        return [slot for slot in slots if not self.is_vacant(slot)]

    @property
    def seated_engines(self) -> list[Slot]:
        """The slots of engines that have a seat, or end. All are looked at after a change alone."""
        num_seatings = self._engines[0][EngineField.SEATINGS] if self._engines else 0
        if num_seatings != self._num_seatings:
            self._seated = self.occupied("engine")
            self._num_seatings = num_seatings
        return self._seated

    def seat(self, engine: Slot, seating: Seating) -> None:
        """Change whether an engine has its seat; for the supervisor alone."""
        engine[EngineField.SEATING] = seating
        self.note_seating()

    def note_seating(self) -> None:
        """Have all processes look at the seats again; for the supervisor alone."""
        self._engines[0].add(EngineField.SEATINGS)

    def unhealthy(self) -> list[Seat]:
        """Return the processes that do not serve; empty means healthy."""
        now_ns = time.monotonic_ns()
        return [s.seat for s in self.occupied() if not s.healthy(now_ns)]
