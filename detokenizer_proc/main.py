"""Detokenizer process: token ids in, ready-to-write HTTP bytes out.
In: ToDetokenizer (engine_proc).  Out: ToFrontend, ToEngine (stop strings)."""

import time
from array import array

import msgspec

from headrace.board import Field, State
from headrace.config import DetokenizerConfig
from headrace.detokenizer_proc.embedding_reply import EmbeddingReply
from headrace.detokenizer_proc.openai_responses import JSON
from headrace.detokenizer_proc.reply import Reply
from headrace.detokenizer_proc.text import Vocabulary, load_vocabulary
from headrace.errors import QueueFull
from headrace.messages import (
    EmbeddingPlan,
    FinishReason,
    Head,
    Plan,
    ReplyPlan,
    ResponseFrames,
    StepOutput,
    Stop,
    Times,
    ToDetokenizer,
    frontend_of,
    request_of,
)
from headrace.process import Context
from headrace.sockets import STEP_HIGH_WATER, Frame, Inbox, Outbox, address

IDLE_MS = 500


def main(config: DetokenizerConfig, context: Context) -> None:
    """Render what the engine generates, one message per step and frontend, until SIGTERM."""
    slot = context.slot
    replies = Replies(load_vocabulary(config.card.path))
    inbox: Inbox[ToDetokenizer] = Inbox(
        address(config.run_dir, "detokenizer", context.index), ToDetokenizer, STEP_HIGH_WATER
    )
    engine = Outbox(address(config.run_dir, "engine"))
    frontends = [
        Outbox(address(config.run_dir, "frontend", i)) for i in range(config.num_frontends)
    ]
    slot.enter(State.READY)
    while True:
        slot.beat()
        received = inbox.receive(IDLE_MS)
        if received is None:
            continue
        output, tokens = received
        outgoing, stops = replies.take(output, tokens)
        for stop in stops:
            engine.send(stop)
        for frontend, frames in outgoing.items():
            frontends[frontend].send(frames.message(), frames.data())
        slot.add(Field.TOKENS, sum(output.counts))
        slot.add(Field.FRAMES, len(outgoing))
        slot[Field.OPEN_REPLIES] = len(replies)


class Frames:
    """What one step brings for one frontend."""

    def __init__(self) -> None:
        self._heads: dict[int, Head] = {}
        self._chunks: dict[int, list[bytes]] = {}
        self._last: dict[int, bool] = {}

    def add(self, id: int, head: Head | None, data: bytes, last: bool) -> None:
        """Append bytes to a request's response; sequences of one request share its entry."""
        if head is not None:
            self._heads[id] = head
        self._chunks.setdefault(id, []).append(data)
        self._last[id] = last

    def message(self) -> ResponseFrames:
        """Return the message."""
        lengths = [sum(map(len, chunks)) for chunks in self._chunks.values()]
        return ResponseFrames(self._heads, list(self._chunks), lengths, list(self._last.values()))

    def data(self) -> bytes:
        """Return the message's bytes."""
        return b"".join(chunk for chunks in self._chunks.values() for chunk in chunks)


class Replies:
    """All replies of this process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._plans: msgspec.msgpack.Decoder[Plan] = msgspec.msgpack.Decoder(Plan)
        self._replies: dict[int, Reply | EmbeddingReply] = {}

    def __len__(self) -> int:
        return len(self._replies)

    def take(self, output: StepOutput, tokens: Frame) -> tuple[dict[int, Frames], list[Stop]]:
        """Return what a step means for each frontend, and what the engine is to stop."""
        outgoing: dict[int, Frames] = {}
        stops: list[Stop] = []
        ids = array("I")
        ids.frombytes(tokens)
        start = 0
        for id, count, finished in zip(output.ids, output.counts, output.finished, strict=True):
            new = ids[start : start + count].tolist()
            start += count
            if finished is FinishReason.ABORT:
                self._replies.pop(request_of(id), None)
            elif finished is FinishReason.REFUSED:
                refuse(outgoing, request_of(id))
            elif id in output.embeddings:
                self._take_embedding(outgoing, id, output)
            elif self._take_tokens(outgoing, id, new, finished, output):
                stops.append(Stop(id))
        return outgoing, stops

    def _take_tokens(
        self,
        outgoing: dict[int, Frames],
        id: int,
        new: list[int],
        finished: FinishReason | None,
        output: StepOutput,
    ) -> bool:
        """Take a sequence's tokens; return whether the engine is to stop it."""
        request = request_of(id)
        opening = self._start(id, output) if id in output.started else b""
        reply = self._replies.get(request)
        if reply is None:  # aborted, or ended by a stop string the engine had not heard of
            return False
        assert isinstance(reply, Reply)
        logprobs = output.logprobs.get(id, [])
        data, stopped_here = reply.feed(id - request, new, finished, logprobs)
        self._emit(outgoing, request, reply, opening + data)
        return stopped_here

    def _start(self, id: int, output: StepOutput) -> bytes:
        plan = self._plans.decode(output.started[id])
        assert isinstance(plan, ReplyPlan)
        reply = self._replies.setdefault(request_of(id), Reply(plan, self._vocabulary))
        assert isinstance(reply, Reply)
        reply.times = reply.times or times_of(id, output)
        return reply.open(plan, id, output)

    def _take_embedding(self, outgoing: dict[int, Frames], id: int, output: StepOutput) -> None:
        plan = self._plans.decode(output.started[id])
        assert isinstance(plan, EmbeddingPlan)
        reply = self._replies.setdefault(request_of(id), EmbeddingReply(plan))
        assert isinstance(reply, EmbeddingReply)
        reply.times = reply.times or times_of(id, output)
        data = reply.take(plan, output.embeddings[id])
        self._emit(outgoing, request_of(id), reply, data)

    def _emit(
        self, outgoing: dict[int, Frames], request: int, reply: Reply | EmbeddingReply, data: bytes
    ) -> None:
        complete = reply.is_complete
        if not data and not complete:
            return
        head = None if reply.head_sent else Head(200, reply.content_type, reply.times)
        reply.head_sent = True
        outgoing.setdefault(frontend_of(request), Frames()).add(request, head, data, complete)
        if complete:
            del self._replies[request]


def times_of(id: int, output: StepOutput) -> Times | None:
    """Return when a request passed each process: its first token is here, and is being rendered."""
    times = output.times.get(id)
    return times and msgspec.structs.replace(times, rendered=time.monotonic_ns())


def refuse(outgoing: dict[int, Frames], request: int) -> None:
    """Answer a request that the engine has no place for. Nothing of it has been answered yet."""
    error = QueueFull()
    frames = outgoing.setdefault(frontend_of(request), Frames())
    frames.add(request, Head(error.status, JSON), msgspec.json.encode(error.body()), True)
