"""Statistics of responses for spans: tokens, ends and times, counted beside the rendering. Pure.

It counts only with --otlp-traces-endpoint: the core writes most responses, and has none of this.
"""

from dataclasses import dataclass, field

import msgspec

from headrace.ipc.messages import (
    AdapterPlan,
    EmbeddingPlan,
    FinishReason,
    Plan,
    ReportedSampling,
    ResponseFrames,
    ResponsePlan,
    ResponseStats,
    StepOutput,
    request_of,
)

ENDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
LOST = (FinishReason.ABORT, FinishReason.REFUSED)


@dataclass(slots=True)
class ResponseCounts:
    """The counts of one response, so far."""

    response_id: str
    sampling: ReportedSampling | None
    num_sequences: int
    num_prompt: int = 0
    num_cached: int = 0
    num_generated: int = 0
    last_token: int = 0
    failed: bool = False
    model: str = ""
    ends: dict[int, str] = field(default_factory=dict)  # by sequence; "" has not ended

    def stats(self, now_ns: int, is_ended: bool) -> ResponseStats:
        """Return them as a message.

        Args:
            is_ended: of sequences without an end, a stop string was the end.
        """
        stop = "stop" if is_ended and not self.failed else ""
        reasons = [self.ends[id] or stop for id in sorted(self.ends)]
        return ResponseStats(
            num_prompt=self.num_prompt,
            num_cached=self.num_cached,
            num_generated=self.num_generated,
            num_sequences=self.num_sequences,
            finish_reasons=[reason for reason in reasons if reason],
            last_token=self.last_token,
            rendered=now_ns,
            sampling=self.sampling,
            response_id=self.response_id,
            failed=self.failed,
            model=self.model,
        )


class ResponseStatsCollector:
    """The counts of all open responses. Times are CLOCK_MONOTONIC, ns."""

    def __init__(self) -> None:
        self._open: dict[int, ResponseCounts] = {}
        self._plans: msgspec.msgpack.Decoder[Plan] = msgspec.msgpack.Decoder(Plan)
        self._encoder = msgspec.msgpack.Encoder()

    def feed(self, output: StepOutput, now_ns: int) -> None:
        """Take what a step brought."""
        for id, encoded in output.started.items():
            self._start(id, self._plans.decode(encoded), output.cached.get(id, 0))
        for id, count, finished in output.rows():
            request = request_of(id)
            counts = self._open.get(request)
            if counts is None:
                continue
            if request in output.failed:
                counts.failed = True
                continue
            if finished in LOST:
                del self._open[request]
                continue
            counts.num_generated += count
            counts.last_token = now_ns
            if finished is not None and id not in output.embeddings:
                counts.ends[id] = ENDS[finished]

    def _start(self, id: int, plan: Plan, num_cached: int) -> None:
        if isinstance(plan, AdapterPlan):  # it generates nothing
            return
        request = request_of(id)
        counts = self._open.get(request)
        if counts is None:
            sampling = plan.sampling if isinstance(plan, ResponsePlan) else None
            response_id = "" if isinstance(plan, EmbeddingPlan) else plan.response_id
            counts = ResponseCounts(response_id, sampling, plan.num_sequences, model=plan.model)
            self._open[request] = counts
        if isinstance(plan, ResponsePlan):
            counts.ends[id] = ""
        if not (isinstance(plan, ResponsePlan) and plan.shares_prompt):
            counts.num_prompt += plan.num_prompt_tokens
            counts.num_cached += num_cached

    def add_to(self, frames: ResponseFrames, now_ns: int) -> ResponseFrames:
        """Return a message with the counts of the responses that begin or end in it."""
        ended = set()
        if 1 in frames.last:
            ids = memoryview(frames.ids).cast("Q")
            ended = {request_of(id) for id, last in zip(ids, frames.last, strict=True) if last == 1}
        reported = self._open.keys() & (ended | frames.heads.keys())
        if not reported:
            return frames
        stats = {
            id: self._encoder.encode(self._open[id].stats(now_ns, id in ended)) for id in reported
        }
        for id in ended:
            self._open.pop(id, None)
        return msgspec.structs.replace(frames, stats=stats)

    def clear(self) -> None:
        """Forget all responses: their requests are sent again."""
        self._open.clear()
