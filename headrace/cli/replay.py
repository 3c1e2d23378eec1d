"""`headrace replay DIR`: replays a process's recorded messages to one that runs alone.

The files are those of `--record DIR`. The process gets the messages of one file, and the processes
around it are played. Its output is counted, timed and compared with the recorded output.
"""

import contextlib
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace import logs
from headrace.board.board import Board, Seat, Slot, State
from headrace.board.fields import CommonField, DetokenizerField, FrontendField
from headrace.cli.replay_compare import (
    Outcomes,
    ReplayedResponses,
    comparable,
    compare,
    ids_of,
    outcomes,
    responses_of,
)
from headrace.config.flags import Parser
from headrace.errors import ConfigError, HeadraceError, end_command
from headrace.ipc.messages import (
    Abort,
    HttpRequest,
    Message,
    RenewLeases,
    ToDetokenizer,
    ToEngine,
    ToFrontend,
    ToTokenizer,
    request_of,
)
from headrace.ipc.recorder import SUFFIX, Entry, read_record
from headrace.ipc.schema_fingerprint import fingerprint
from headrace.ipc.sockets import Inbox, Outbox, address
from headrace.runtime.process import LaunchSpec, spawn
from headrace.runtime.run_directory import RunDirectory

# Messages that each kind of process receives, and the kinds that it sends to.
UNIONS: dict[str, Any] = {
    "frontend": ToFrontend,
    "tokenizer": ToTokenizer,
    "engine": ToEngine,
    "detokenizer": ToDetokenizer,
}
TAKEN = {  # counters of messages that a receiver has handled
    "frontend": FrontendField.MESSAGES_TAKEN,
    "detokenizer": DetokenizerField.MESSAGES_TAKEN,
}
RECEIVERS = {
    "tokenizer": ("engine", "frontend"),
    "engine": ("detokenizer",),
    "detokenizer": ("frontend", "engine"),
}
MOCK = "mock"
METRICS = "/metrics"  # whose answer is another each time
START_S = 120
POLL_INTERVAL_MS = 50
NUM_BEATS = 10  # of its heart, half a second apart, without an answer: there are no more
BEAT_NS = 500_000_000
STUCK_S = 120.0
RENEW_S = 1.0
AN_HOUR_NS = 3600 * 10**9


@dataclass(frozen=True)
class Burst:
    """The recorded messages to one process."""

    note: LaunchSpec
    messages: list[tuple[int, list[tuple[Message, bytes]]]]  # CLOCK_MONOTONIC, ns

    @property
    def seat(self) -> Seat:
        """The seat of the process."""
        return Seat(self.note.role, self.note.index)

    @property
    def seconds(self) -> float:
        """Duration of the recording, seconds."""
        return (self.messages[-1][0] - self.messages[0][0]) / 1e9 if self.messages else 0.0


def read_burst(folder: Path, seat: Seat) -> Burst | None:
    """Read the record of a process; None where there is none.

    Raises:
        HeadraceError: it is of another version, whose messages mean something else, or of a
            process that does nothing without memory that it shared.
    """
    path = folder / f"{seat.role}-{seat.index}{SUFFIX}"
    if not path.exists():
        return None
    entries = read_record(path)
    try:
        note = msgspec.msgpack.decode(next(entries).frames[0], type=LaunchSpec)
        if note.fingerprint != fingerprint():
            raise HeadraceError(
                f"{path} was recorded by another version of headrace; record it again with this one"
            )
        if shares_images(note):
            raise HeadraceError(f"{seat} shares images with others, and cannot be replayed alone")
        decoder = msgspec.msgpack.Decoder(UNIONS[seat.role])
        messages = [(entry.at_ns, decoded(decoder, entry)) for entry in entries]
    except (msgspec.MsgspecError, StopIteration, ValueError) as error:
        raise HeadraceError(f"{path} is not a record: {error}") from None
    return Burst(note, [(at, pairs) for at, pairs in messages if pairs])


def shares_images(note: LaunchSpec) -> bool:
    """Whether a process finds images in the arena, or leaves some there."""
    config = msgspec.msgpack.decode(note.config)
    if config.get("arena_fd") is None:
        return False
    return note.role == "engine" or note.index > config["num_tokenizers"]


def decoded(decoder: "msgspec.msgpack.Decoder[Any]", entry: Entry) -> list[tuple[Message, bytes]]:
    """Return the messages of an entry that are to be played."""
    pairs = [(decoder.decode(message), bulk) for message, bulk in entry.pairs()]
    return [(message, bulk) for message, bulk in pairs if is_played(message)]


def is_played(message: Message) -> bool:
    """Whether a message is a part of the burst: the replay renews leases by itself."""
    is_metrics = isinstance(message, HttpRequest) and message.path == METRICS
    return not isinstance(message, RenewLeases) and not is_metrics


class Stage:
    """A process alone, and those around it, played."""

    def __init__(self, burst: Burst, expected: Outcomes, is_mock: bool) -> None:
        """Start the process and wait until it serves; in the end, these are its answers.

        Args:
            is_mock: no model is loaded; for an engine.

        Raises:
            HeadraceError: it cannot start; the text says why.
        """
        self._directory = RunDirectory()
        note, seat = burst.note, burst.seat
        self._board = Board.create(note.seats)
        for slot in self._board.slots:
            if slot.seat != seat:
                play(slot)
        self.responses = ReplayedResponses(expected)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, args=(slot,), daemon=True)
            for role in RECEIVERS[seat.role]
            for slot in self._board.of(role)
        ]
        for thread in self._threads:
            thread.start()
        config = msgspec.msgpack.decode(note.config) | {"run_dir": self._directory.path}
        config["demand_fd"] = -1  # no supervisor waits; other roles ignore it
        config["gateway"] = None  # nor a server on another machine
        if is_mock:
            config["engine"] = MOCK
        self._process = spawn(seat, config, self._board, note.log_level)
        self.slot = self._board.slot(seat.role, seat.index)
        self._outbox = Outbox(address(self._directory.path, seat.role, seat.index))
        self._renewed_at = 0.0
        self._open: set[int] = set()
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while self.slot[CommonField.STATE] != State.READY:
            self.check()
            if time.monotonic() > deadline:
                raise HeadraceError(f"{self.slot.seat} has not started within {START_S} s")
            time.sleep(POLL_INTERVAL_MS / 1000)

    def check(self) -> None:
        """Raise `HeadraceError` if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise HeadraceError(f"{self.slot.seat} exited with {code} ({self.slot.exit_reason})")

    def _listen(self, slot: Slot) -> None:
        """Receive messages as one process."""
        role, index = slot.seat.role, slot.seat.index
        inbox: Inbox[Any] = Inbox(address(self._directory.path, role, index), UNIONS[role])
        while not self._stop.is_set():
            received = inbox.receive(POLL_INTERVAL_MS)
            if received is not None:
                self.responses.take(*received)
                if role in TAKEN:
                    slot.add(TAKEN[role])
        inbox.close()

    def send(self, pairs: list[tuple[Message, bytes]]) -> None:
        """Send messages that were received at once."""
        for message, _ in pairs:
            ids = {request_of(id) for id in ids_of(message)}
            self.responses.expect(ids)
            self._open |= ids
            if isinstance(message, Abort):
                self._open.discard(message.request)
        self._outbox.send_all(pairs)

    def renew(self) -> None:
        """Renew the leases of the requests at an engine, periodically."""
        now = time.monotonic()
        if self.slot.seat.role == "engine" and now - self._renewed_at > RENEW_S:
            self._renewed_at = now
            self._outbox.send(RenewLeases(), array("Q", self._open).tobytes())

    def close(self) -> None:
        """End the process and leave nothing of it."""
        self._process.terminate()
        self._process.wait()
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._outbox.close()
        self._directory.remove()


class Silence:
    """Time since a process last sent a message while its heartbeats continue; a stopped one is not
    silent."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._message_at = 0.0
        self._beat_ns = 0
        self._num_beats = 0

    def is_final(self, message_at: float, now_ns: int) -> bool:
        """Whether nothing more is to come; to be called often.

        Args:
            said_at: when it last received or sent something, by any clock.

        Raises:
            HeadraceError: it is stuck.
        """
        if self._slot.silent_s(now_ns) > STUCK_S:
            raise HeadraceError(f"{self._slot.seat} has been silent for {STUCK_S:g} s")
        beat_ns = self._slot[CommonField.HEARTBEAT_NS]
        if message_at != self._message_at:
            self._message_at, self._beat_ns, self._num_beats = message_at, beat_ns, 0
        elif beat_ns - self._beat_ns >= BEAT_NS:
            self._beat_ns = beat_ns
            self._num_beats += 1
        return self._num_beats >= NUM_BEATS


def play(slot: Slot) -> None:
    """Have a seat look as if its process were there, and well for as long as this takes."""
    slot.enter(State.STARTING)
    slot.enter(State.READY)
    slot[CommonField.HEARTBEAT_NS] = time.monotonic_ns() + AN_HOUR_NS


def perform(stage: Stage, burst: Burst, keeps_pace: bool) -> float:
    """Play a burst and wait for the answers; return how long it took, from first to last."""
    began = time.monotonic()
    for at, pairs in burst.messages:
        due = began + (at - burst.messages[0][0]) / 1e9 if keeps_pace else 0.0
        while (wait_s := due - time.monotonic()) > 0:
            stage.renew()
            time.sleep(min(wait_s, RENEW_S))
        stage.renew()
        stage.send(pairs)
    last_sent = time.monotonic()
    silence = Silence(stage.slot)
    while not stage.responses.are_complete:
        if silence.is_final(max(last_sent, stage.responses.last_at), time.monotonic_ns()):
            break
        stage.check()
        stage.renew()
        time.sleep(POLL_INTERVAL_MS / 1000)
    return max(last_sent, stage.responses.last_at) - began


def report(burst: Burst, answers: ReplayedResponses, seconds: float) -> Iterator[str]:
    """Yield the report lines of a process."""
    num_messages = sum(len(pairs) for _, pairs in burst.messages)
    rate = num_messages / seconds if seconds else 0.0
    yield (
        f"{burst.seat}: {num_messages} messages in {seconds:.3f} s, {rate:.0f}/s "
        f"(recorded in {burst.seconds:.3f} s)"
    )
    latencies = sorted(answers.latencies_s)
    if latencies:
        shares = [f"p{p} {1e3 * latencies[len(latencies) * p // 100]:.2f} ms" for p in (50, 90, 99)]
        worst = f"max {1e3 * latencies[-1]:.2f} ms"
        yield f"from a message to its answer: {', '.join(shares)}, {worst}"


def replay(folder: Path, seat: Seat, keeps_pace: bool, is_mock: bool = False) -> int:
    """Replay a record and print the report; return the exit status: 0 if answers are equal.

    The mock engine's are its own, and only have to be all there.
    """
    burst = read_burst(folder, seat)
    if burst is None or not burst.messages:
        raise HeadraceError(f"{folder} has no messages of {seat}")
    role = seat.role
    requests = comparable(message for _, pairs in burst.messages for message, _ in pairs)
    recorded = responses_of(role, outcomes(messages_of(folder, burst)), requests)
    stage = Stage(burst, recorded, is_mock)
    try:
        seconds = perform(stage, burst, keeps_pace)
    finally:
        stage.close()
    if is_mock:
        print(*report(burst, stage.responses, seconds), sep="\n")
        return 0 if stage.responses.are_complete else 1
    verdict = compare(recorded, responses_of(role, outcomes(stage.responses.messages), requests))
    print(*report(burst, stage.responses, seconds), verdict, sep="\n")
    return 0 if verdict.is_same else 1


def messages_of(folder: Path, burst: Burst) -> Iterator[tuple[Message, bytes]]:
    """Yield the recorded messages to the receivers of a process."""
    for seat in burst.note.seats:
        if seat.role in RECEIVERS[burst.seat.role]:
            other = read_burst(folder, seat)
            for _, pairs in other.messages if other is not None else ():
                yield from pairs


def seat_named(name: str) -> Seat:
    """Return the seat that a file is named after."""
    role, _, index = name.removesuffix(SUFFIX).partition("-")
    if role not in RECEIVERS or not (index or "0").isdecimal():
        raise ConfigError(
            f"--process {name}: it must be one of tokenizer-0, engine, mock, detokenizer-0"
        )
    return Seat(role, int(index or 0))


def main(argv: list[str]) -> None:
    """Replay; exit with 1 where an answer differs, or in one line where that cannot be."""
    parser = Parser(prog="headrace replay", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder of --record")
    parser.add_argument(
        "--process",
        default="tokenizer-0",
        help="the process; mock: the engine's messages, without a model; %(default)s",
    )
    parser.add_argument(
        "--pace", choices=("recorded", "max"), default="recorded", help="speed; %(default)s"
    )
    with contextlib.suppress(KeyboardInterrupt):
        try:
            args = parser.parse_args(argv)
            logs.setup("replay", "info")
            is_mock = args.process == MOCK
            seat = seat_named("engine" if is_mock else args.process)
            sys.exit(replay(args.folder, seat, args.pace == "recorded", is_mock))
        except HeadraceError as error:
            end_command("headrace replay", error)
        except OSError as error:
            print(f"headrace replay: error: {error}", file=sys.stderr)
    sys.exit(1)
