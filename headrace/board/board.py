"""The board: state, heartbeat and metrics of every process, in shared memory.

One memfd, inherited by file descriptor: it has no name, so nothing is left behind however the
server dies. Each process owns one slot and is its only writer; 8-byte aligned stores are atomic
on the processors we run on, so readers need no lock. Counters only grow unless called a gauge.
"""

import enum
import mmap
import os
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from headrace.board.histogram import COUNTS, HISTOGRAM_WORDS, SECONDS, Histogram, Scale
from headrace.board.http_counts import HTTP_WORDS
from headrace.errors import ConfigError

SLOT_WORDS = 5632  # of 8 bytes: whole pages, so neighbors never share a cache line
LAST_WORDS = 64  # here a slot's text begins, 512 bytes
MESSAGES_SENT = 128  # here how many messages it has sent to each frontend
HISTOGRAMS = 192  # and here its histograms
LOG_WORDS = 1024
LOG = SLOT_WORDS - LOG_WORDS  # here the end of its log: how many bytes there were, and a ring
HTTP = LOG - HTTP_WORDS  # here what it counts of HTTP
MAX_IDS = 64
IDS = HTTP - MAX_IDS  # and here ids of requests that are open
HEARTBEAT_LIMIT_S = 4.0  # older than this is ill; processes beat at least once a second


class State(enum.IntEnum):
    """The lifecycle state of a process."""

    ABSENT = 0
    STARTING = 1
    READY = 2
    DEAD = 3  # written by the supervisor


class Field(enum.IntEnum):
    """Words of a slot."""

    PID = 0
    STATE = 1
    HEARTBEAT_NS = 2  # CLOCK_MONOTONIC
    PROGRESS = 3  # gauge, per mille of start-up work done
    STARTS = 4  # of processes in this seat
    STACKS_FD = 5  # the process's own descriptor of its `StackFile`
    HARMED_PID = 7  # the last target of a signal of --chaos; written by the supervisor
    # frontend
    REQUESTS = 8
    RESPONSES = 9
    DISCONNECTS = 10
    OPEN_REQUESTS = 11  # gauge
    BYTES_IN = 12
    BYTES_OUT = 13
    HELD_BYTES = 14  # gauge, of bodies being read
    IS_CLOSED = 25  # gauge: no requests are let in, since the server stops
    KEPT_BYTES = 24  # gauge, of bodies read whose answers are not complete
    UNSENT_BYTES = 15  # gauge, of responses whose clients read too slowly
    CONNECTIONS = 16  # gauge
    OVERLOADS = 17  # requests refused since there is too much to do,
    REQUEST_OVERLOADS = 22  # of which there were too many requests,
    TOKEN_OVERLOADS = 23  # or too many tokens that wait
    UNAUTHORIZED = 18
    PARTINGS = 26  # connections refused or ended: too many, too slow, or not HTTP
    ADMITTED = 20  # gauge: requests that take a place: with a body that has come, not answered
    MESSAGES_TAKEN = 21  # of MESSAGES_SENT to it, handled whole
    ANSWERED = 27  # all that was asked, `/health` too
    LONGEST_CALLBACK_NS = 19  # of CPU time, on the event loop, so far
    LAG_NS = 6  # gauge, how late the event loop's last timer was; before all that is `WORK`
    WISHES = 57  # 7 words, how often operators have asked for each of `WISHES`
    FORWARDED_BYTES = 31  # 26 words, one per tokenizer process: bodies sent to it
    # tokenizer
    HANDLED = 8
    REFUSED = 9
    PROMPT_TOKENS = 10
    HANDLED_BYTES = 11  # of FORWARDED_BYTES, done with
    AT_HAND = 12  # the suspect request that is being handled, 0 where there is none
    IMAGES = 13  # looked for in the arena,
    FOUND_IMAGES = 14  # and found there: prepared for a request before
    IMAGE_BYTES = 15  # gauge, of prepared images in the arena,
    SENT_IMAGE_BYTES = 16  # gauge, and of those that the engine is not done with
    ABANDONED = 17  # of HANDLED, those left undone since their clients had left
    # engine
    STEPS = 8
    RUNNING = 9  # gauge
    WAITING = 10  # gauge
    PAGES_TOTAL = 11  # gauge
    PAGES_FREE = 12  # gauge
    COMPUTED_TOKENS = 13
    GENERATED_TOKENS = 14
    PREEMPTIONS = 15
    ABORTED = 16
    FINISHED = 17
    QUEUE_REFUSALS = 18
    PREFIX_QUERIES = 19  # tokens looked up in the prefix cache
    PREFIX_HITS = 20  # and those found
    DRAFTS = 21  # tokens guessed by speculation
    RIGHT_DRAFTS = 22  # and those right
    LAPSED = 23  # requests aborted since no frontend renewed them
    WAITING_TOKENS = 24  # gauge, tokens to compute for waiting sequences
    ENDED = 25  # 2 words, sequences run to their end, by `FinishReason`
    PREFILLED_TOKENS = 27  # of prompts that have a first token, those computed,
    CACHED_TOKENS = 28  # and those found in the prefix cache
    PAGE_TOKENS = 29  # gauge, that a page of the KV cache holds
    DRAFT_ROUNDS = 30  # steps of sequences in which tokens were guessed
    TOKENS_PER_SECOND = 31  # gauge, generated lately
    RIGHT_AT = 32  # 15 words, one per place of a guess: how often it was right
    EMBEDDING_QUERIES = 47  # images looked up among those encoded before
    EMBEDDING_HITS = 48  # and those found
    WAITING_IMAGES = 49  # gauge, to be encoded or being it
    EMBEDDING_ROWS = 50  # gauge, of the embedding area,
    EMBEDDING_ROWS_FREE = 51  # gauge, and those of no image in use
    STEPS_AHEAD = 52  # of STEPS, those sent while another was computed
    STEPPED_NS = 53  # gauge, CLOCK_MONOTONIC, when a step has ended,
    STEP_DUE_NS = 54  # gauge, and when the oldest that is open is overdue; 0 is never
    # worker
    COMPUTED_STEPS = 8
    # vision worker
    ENCODED_IMAGES = 8
    ENCODER_BATCHES = 9  # calls of the tower, for these
    # fetcher, with AT_HAND
    FETCHED_IMAGES = 8
    FETCH_REFUSALS = 9
    # detokenizer
    TOKENS = 8
    OPEN_REPLIES = 9  # gauge
    FRAMES = 10
    TOOL_READINGS = 11  # 12 words, by what `tool_calls.py` tells apart
    REPLY_AT_HAND = 23  # the request whose reply is being written, 0 where it is not known,
    LAST_REPLY_AT_HAND = 24  # and when the process died that was in this seat before


WORK = slice(8, 64)  # of these words some change when a process gets something done
GAUGES = {
    "frontend": (
        *(Field.OPEN_REQUESTS, Field.HELD_BYTES, Field.UNSENT_BYTES, Field.CONNECTIONS),
        *(Field.ADMITTED, Field.KEPT_BYTES, Field.IS_CLOSED, Field.LAG_NS),
    ),
    "tokenizer": (Field.IMAGE_BYTES, Field.SENT_IMAGE_BYTES),
    "engine": (
        *(Field.RUNNING, Field.WAITING, Field.WAITING_TOKENS),
        *(Field.PAGES_TOTAL, Field.PAGES_FREE, Field.WAITING_IMAGES),
        *(Field.EMBEDDING_ROWS, Field.EMBEDDING_ROWS_FREE, Field.STEPPED_NS, Field.STEP_DUE_NS),
    ),
    "worker": (),
    "vision": (),
    "fetcher": (),
    "detokenizer": (Field.OPEN_REPLIES,),
}
MAX_FRONTENDS = HISTOGRAMS - MESSAGES_SENT
MAX_TOKENIZERS = 16  # beside the one for long prompts
MAX_PREPROCESSORS = 8  # beside both and the one for GETs, for images


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
        """What it is counted in."""
        return SECONDS if self < Timing.PROMPT else COUNTS


@dataclass(frozen=True)
class Seat:
    """A place for a process: its role, and its index there."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


class Slot:
    """One process's part of the board."""

    def __init__(self, words: "memoryview[int]", seat: Seat) -> None:
        self.seat = seat
        self._words = words
        self._text = words[LAST_WORDS:MESSAGES_SENT].cast("B")
        starts = range(HISTOGRAMS, IDS - HISTOGRAM_WORDS + 1, HISTOGRAM_WORDS)
        self._histograms = [
            Histogram(words[start : start + HISTOGRAM_WORDS], span.scale)
            for start, span in zip(starts, Timing, strict=False)
        ]
        self._ids = words[IDS:HTTP]
        self.http_words = words[HTTP:LOG]  # of `HttpCounts`
        self._log = words[LOG + 1 :].cast("B")

    def __getitem__(self, field: int) -> int:
        return self._words[field]

    def __setitem__(self, field: int, value: int) -> None:
        self._words[field] = value

    def add(self, field: int, amount: int = 1) -> None:
        """Count; for the slot's owner alone."""
        self._words[field] += amount

    def histogram(self, span: Timing) -> Histogram:
        """Return one of the histograms."""
        return self._histograms[span]

    def beat(self) -> None:
        """Say that this process is alive."""
        self._words[Field.HEARTBEAT_NS] = time.monotonic_ns()

    def silent_s(self, now_ns: int) -> float:
        """Return for how long nothing has been heard of the process, if ever it was there."""
        return max(now_ns - self[Field.HEARTBEAT_NS], 0) / 1e9 if self[Field.STATE] else 0.0

    def enter(self, state: State) -> None:
        """Move to `state`."""
        self.beat()
        self._words[Field.PID] = os.getpid()
        self._words[Field.STATE] = state
        if state == State.STARTING:
            self.add(Field.STARTS)
            self[LOG] = 0
            self.open_ids = ()
            for field in GAUGES[self.seat.role]:
                self[field] = 0

    @property
    def work(self) -> bytes:
        """What the process counts of what it does: the same again is that it has done nothing."""
        return bytes(self._words[WORK])

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
        """Why the process could not go on; "" where it did not say."""
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
        state = State(self[Field.STATE])
        if state != State.READY:
            return f"{self.seat} is {state.name.lower()}"
        patient_until_ns = since_ns + round(HEARTBEAT_LIMIT_S * 1e9)
        if self.silent_s(now_ns) >= HEARTBEAT_LIMIT_S and now_ns >= patient_until_ns:
            return f"{self.seat} has been silent for {self.silent_s(now_ns):.0f} s"
        due_ns = self[Field.STEP_DUE_NS] if self.seat.role == "engine" else 0
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

    def unhealthy(self) -> list[Seat]:
        """Return the processes that do not serve; empty means healthy."""
        now_ns = time.monotonic_ns()
        return [s.seat for s in self.slots if not s.healthy(now_ns)]
