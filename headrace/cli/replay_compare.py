"""Compares the recorded output of a process with that of a replay.

Compared is what comes of it for a client, not how it comes in pieces: tokens, bodies, the text of
streams. What was aborted or stopped ended by chance, and is not compared.
"""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.ipc.messages import (
    NOT_FINISHED,
    Abort,
    FinishReason,
    GenerateRequest,
    Head,
    HttpRequest,
    Message,
    ResponseFrames,
    StepOutput,
    StopSequence,
    request_of,
)
from headrace.ipc.sockets import Frame

EVENT_STREAM = "text/event-stream"
# Fields of events that go on where the same one of the event before ended.
PIECES = {"content", "text", "reasoning_content", "reasoning", "arguments", "delta", "thinking"}
PIECES |= {"partial_json", "refusal", "signature"}
COUNTERS = {"sequence_number"}  # of events, which may be fewer and longer
SHOWN = 5  # ids of answers that differ

Received = tuple[Message, bytes]
Outcomes = dict[tuple[int, str], Any]  # by id, of a sequence or a request, and kind
KINDS = {
    "tokenizer": ("request", "body"),
    "engine": ("tokens", "end", "embedding"),
    "detokenizer": ("body", "stop"),
}


def ids_of(message: Message) -> list[int]:
    """Return which requests or sequences a message is about."""
    match message:
        case HttpRequest(id=id) | GenerateRequest(id=id) | StopSequence(id=id):
            return [id]
        case StepOutput(ids=ids) | ResponseFrames(ids=ids):
            return memoryview(ids).cast("Q").tolist()
    return []


def ends_of(message: Message) -> list[int]:
    """Return the requests whose last message it is."""
    match message:
        case GenerateRequest(id=id):
            return [id]
        case StepOutput(finished=finished):
            flags = [finish != NOT_FINISHED for finish in finished]
            return [id for id, flag in zip(ids_of(message), flags, strict=True) if flag]
        case ResponseFrames(last=last):
            ids = map(request_of, ids_of(message))
            return [id for id, flag in zip(ids, last, strict=True) if flag]
    return []


class ReplayedResponses:
    """Collects responses during a replay; from several threads."""

    def __init__(self, expected: Outcomes) -> None:
        """Wait for the ends of the expected requests, if there are any."""
        self.messages: list[Received] = []
        self.latencies_s: list[float] = []
        self.last_at = 0.0
        self._sent_at: dict[int, float] = {}
        self._missing = {id for id, kind in expected if kind in ("request", "body", "end")}
        self._knows_its_end = bool(self._missing)
        self._lock = threading.Lock()

    def expect(self, requests: Iterable[int]) -> None:
        """Note that something about these is being sent."""
        now = time.monotonic()
        with self._lock:
            self._sent_at |= dict.fromkeys(requests, now)

    def take(self, message: Message, bulk: Frame) -> None:
        """Record an answer."""
        now = time.monotonic()
        with self._lock:
            self.last_at = now
            self.messages.append((message, bytes(bulk)))
            for request in {request_of(id) for id in ids_of(message)}:
                if (sent_at := self._sent_at.pop(request, None)) is not None:
                    self.latencies_s.append(now - sent_at)
            self._missing.difference_update(ends_of(message))

    @property
    def are_complete(self) -> bool:
        """Whether all there was to come has come."""
        with self._lock:
            return self._knows_its_end and not self._missing


@dataclass
class ReplayedResponse:
    """An answer to a client, so far."""

    head: Head | None = None
    data: bytearray = field(default_factory=bytearray)

    @property
    def outcome(self) -> Any:
        """The final state of the client."""
        if self.head is None:
            return bytes(self.data)
        kind = self.head.content_type
        text = merged(self.data) if kind.startswith(EVENT_STREAM) else bytes(self.data)
        return self.head.status, kind, text


def outcomes(messages: Iterable[Received]) -> Outcomes:
    """Return what messages come to."""
    found: Outcomes = {}
    tokens: dict[int, bytearray] = {}
    bodies: dict[int, ReplayedResponse] = {}
    for message, bulk in messages:
        match message:
            case GenerateRequest(id=id):
                asked = msgspec.msgpack.encode(msgspec.structs.replace(message, times=None))
                found[id, "request"] = asked, bulk
            case StopSequence(id=id):
                found[id, "stop"] = True
            case StepOutput():
                add_tokens(message, bulk, tokens, found)
            case ResponseFrames():
                for id, head, piece, _, _ in message.split(bulk):
                    body = bodies.setdefault(request_of(id), ReplayedResponse())
                    body.head = body.head or head
                    body.data += piece
    found |= {(id, "tokens"): bytes(ids) for id, ids in tokens.items()}
    return found | {(id, "body"): body.outcome for id, body in bodies.items()}


def add_tokens(
    output: StepOutput, bulk: bytes, tokens: dict[int, bytearray], found: Outcomes
) -> None:
    """Record the tokens of a step."""
    start = 0
    for id, count, finish in output.rows():
        end = start + 4 * count
        tokens.setdefault(id, bytearray()).extend(bulk[start:end])
        start = end
        if finish is not None:
            found[id, "end"] = finish
    found |= {(id, "embedding"): vector for id, vector in output.embeddings.items()}


def merged(stream: bytes | bytearray) -> dict[str, Any]:
    """Return what the events of a stream come to, by field, however the text is cut up."""
    found: dict[str, Any] = {}
    for line in bytes(stream).splitlines():
        if line.startswith(b"data: {"):
            merge(msgspec.json.decode(line.removeprefix(b"data: ")), "", "", found)
        elif line.startswith(b"data: "):
            found[line.decode()] = True
    return found


def merge(value: Any, path: str, name: str, found: dict[str, Any]) -> None:
    """Merge a value of an event into the values so far."""
    match value:
        case dict():
            # Pieces of one thing are those of events of one type.
            path += f":{value['type']}" if isinstance(value.get("type"), str) else ""
            for key, item in value.items():
                merge(item, f"{path}.{key}", key, found)
        case list() if all(isinstance(item, dict) and "index" in item for item in value):
            for item in value:
                merge(item, f"{path}[{item['index']}]", name, found)
        case list():
            found.setdefault(path, []).extend(value)
        case str() if name in PIECES:
            found[path] = found.get(path, "") + value
        case None if path in found:
            pass
        case _ if name not in COUNTERS:
            found[path] = value


@dataclass(frozen=True)
class Comparison:
    """The comparison of answers with recorded ones."""

    num_same: int
    different: list[int]  # ids
    missing: list[int]
    num_new: int  # of which nothing is recorded

    @property
    def is_same(self) -> bool:
        """Whether all that was recorded came again."""
        return not self.different and not self.missing

    def __str__(self) -> str:
        lines = [f"the same as recorded: {self.num_same}; without a recorded one: {self.num_new}"]
        for name, ids in (("different", self.different), ("missing", self.missing)):
            if ids:
                shown = ", ".join(f"{id:x}" for id in ids[:SHOWN])
                more = ", …" if len(ids) > SHOWN else ""
                lines.append(f"{name}: {len(ids)} ({shown}{more})")
        return "\n".join(lines)


def comparable(sent: Iterable[Message]) -> set[int]:
    """Return the requests of messages whose answers are to be the same each time."""
    played: set[int] = set()
    cut: set[int] = set()
    for message in sent:
        played |= set(map(request_of, ids_of(message)))
        match message:
            case Abort(request):
                cut.add(request)
            case StopSequence(id=id):
                cut.add(request_of(id))
            case StepOutput():
                ends = message.rows()
                cut |= {request_of(id) for id, _, end in ends if end is FinishReason.ABORT}
    return played - cut


def responses_of(role: str, found: Outcomes, requests: set[int]) -> Outcomes:
    """Return the answers of a kind of process to some requests.

    Frontends hear of generated text from detokenizers, and of all else from tokenizers.
    """
    generated = {request_of(id) for id, kind in found if kind == "request"}
    others = generated if role == "tokenizer" else set[int]()
    return {
        (id, kind): outcome
        for (id, kind), outcome in found.items()
        if kind in KINDS[role] and request_of(id) in requests
        if kind != "body" or id not in others
    }


def compare(recorded: Outcomes, replayed: Outcomes) -> Comparison:
    """Compare."""
    same = [key for key, outcome in recorded.items() if replayed.get(key) == outcome]
    missing = recorded.keys() - replayed.keys()
    different = recorded.keys() - missing - set(same)
    return Comparison(
        len(same),
        sorted({id for id, _ in different}),
        sorted({id for id, _ in missing}),
        len(replayed.keys() - recorded.keys()),
    )
