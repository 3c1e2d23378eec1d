"""All responses of a process. The core writes common ones, whole steps at a time. Those with log
probabilities, several candidates or embeddings are assembled here, by sequence.
"""

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import msgspec

from headrace.detokenizer_proc.bodies import LONG_BYTES, Bodies, SlicedBody
from headrace.detokenizer_proc.core_texts import CoreTexts
from headrace.detokenizer_proc.frames import Frames
from headrace.detokenizer_proc.renderers.embedding_response import EmbeddingResponse
from headrace.detokenizer_proc.renderers.event_template import template_of
from headrace.detokenizer_proc.renderers.json_slices import SLICE_BYTES
from headrace.detokenizer_proc.renderers.renderer import EVENT_STREAM, JSON, Choice, TokenUsage
from headrace.detokenizer_proc.renderers.renderer_selection import renderer_of
from headrace.detokenizer_proc.text import TableVocabulary, Vocabulary
from headrace.detokenizer_proc.text_response import UNLIMITED, TextResponse
from headrace.errors import (
    DeadlyRequest,
    InternalError,
    InvalidValue,
    QueueFull,
    RequestError,
)
from headrace.ipc.messages import (
    Abort,
    AdapterPlan,
    Api,
    EmbeddingPlan,
    FinishReason,
    GeneratedTokens,
    Head,
    Plan,
    ResponsePlan,
    SimilarityPlan,
    StepOutput,
    StopSequence,
    Times,
    frontend_of,
    request_of,
)
from headrace.ipc.sockets import Frame
from headrace.logs import log_failure
from headrace.response_bodies.errors import (
    anthropic_error,
    cohere_error,
    jina_error,
    openai_error,
)
from headrace.system.cpu_limit import CpuLimitExceeded

log = logging.getLogger(__name__)

ABORTED, REFUSED = bytes([FinishReason.ABORT]), bytes([FinishReason.REFUSED])


@dataclass(slots=True)
class CoreResponse:
    """Data for the end of a response that the core does not have."""

    times: Times | None
    plans: list[ResponsePlan] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0

    def add(self, plan: ResponsePlan, num_cached: int) -> None:
        """Add a sequence."""
        self.plans.append(plan)
        if not plan.shares_prompt:
            self.num_prompt += plan.num_prompt_tokens
            self.num_cached += num_cached


class InflightResponses:
    """All responses of this process, for `num_frontends`. Each call of a parser is within `limit`.

    `in_progress` is called with the request that a death is blamed on: the one that is worked at
    outside the core. Between turns it is the one whose body is being written, and 0 without such a
    body. Where the core works it is 0.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_frontends: int,
        stream_interval: int = 1,
        limit: AbstractContextManager[None] = UNLIMITED,
        in_progress: Callable[[int], None] = lambda _request: None,
    ) -> None:
        self._limit = limit
        self._in_progress = in_progress
        self._interval = stream_interval
        self._vocabulary = vocabulary
        self._plans: msgspec.msgpack.Decoder[Plan] = msgspec.msgpack.Decoder(Plan)
        self._core: CoreTexts | None = None
        if isinstance(vocabulary, TableVocabulary):
            self._core = CoreTexts(vocabulary.table, num_frontends, stream_interval)
        self._core_responses: dict[int, CoreResponse] = {}
        self._responses: dict[int, TextResponse | EmbeddingResponse] = {}
        self._openings: dict[int, bytes] = {}  # of sequences whose first tokens come next
        self._outgoing: dict[int, Frames] = {}
        self._bodies = Bodies()
        self._stops: list[StopSequence | Abort] = []
        self._readings = Counter[int]()

    def __len__(self) -> int:
        return (
            len(self._responses)
            + len(self._bodies)
            + (0 if self._core is None else len(self._core))
        )

    @property
    def is_writing(self) -> bool:
        """Whether there are whole answers of which a part is still to be rendered."""
        return len(self._bodies) > 0

    def feed(self, output: StepOutput, tokens: Frame) -> None:
        """Handle the outputs of a step."""
        self._in_progress(0)
        has_dead = ABORTED in output.finished or REFUSED in output.finished
        dead = dead_ones(output) if has_dead else frozenset[int]()
        for request, plan in output.failed.items():
            reason = output.reasons.get(request)
            error: RequestError = DeadlyRequest() if reason is None else InternalError(reason)
            if reason is not None and request in output.invalid:
                error = InvalidValue(reason, "model")
            self._fail_elsewhere(request, self._plans.decode(plan), error)
        for id in output.started:
            if id not in dead and id not in output.embeddings:
                self._start(id, output)
        rows: range | list[int] = range(len(output.finished))
        if self._core is not None:
            rows = self._core.feed(output.ids, output.counts, output.finished, tokens)
            for id in dead:  # maybe one that has not begun, of a request that has
                self._core.close(request_of(id))
                self._core_responses.pop(request_of(id), None)
        for id in dead:
            self._bodies.drop(request_of(id))
        if rows:
            self._take_rows(rows, output, tokens)
        self._in_progress(self._bodies.in_progress)

    def _take_rows(self, rows: "range | list[int]", output: StepOutput, tokens: Frame) -> None:
        """Handle the outputs of sequences outside the core."""
        wanted = set(rows)
        ids = array("I")
        ids.frombytes(tokens)
        start = 0
        for row, (id, count, finished) in enumerate(output.rows()):
            if row in wanted:
                self._take(id, ids[start : start + count].tolist(), finished, output)
            start += count

    def _take(
        self, id: int, new: list[int], finished: FinishReason | None, output: StepOutput
    ) -> None:
        request = request_of(id)
        if finished is FinishReason.ABORT:
            self._responses.pop(request, None)
        elif finished is FinishReason.REFUSED:
            plan = self._plans.decode(output.started[id]) if id in output.started else None
            self._frames(request).add(request, *error_body(QueueFull(), plan), True)
        elif id in output.embeddings:
            self._take_embedding(id, output)
        else:
            self._take_tokens(id, new, finished, output)

    def stops(self) -> list[StopSequence | Abort]:
        """Return what the engine is to stop, since the last time."""
        stops, self._stops = self._stops, []
        if self._core is not None:
            stops += [StopSequence(id) for id in self._core.stopped()]
        return stops

    def readings(self) -> Counter[int]:
        """Return how often texts were read for calls of tools, since the last time."""
        readings = Counter(self._readings)
        self._readings.clear()
        return readings

    def generated(self) -> tuple[GeneratedTokens, bytes]:
        """Return the tokens of all sequences, for a replacement engine."""
        ids, counts, tokens = (b"", b"", b"") if self._core is None else self._core.generated()
        for request, response in self._responses.items():
            for index, generated in (
                response.generated if isinstance(response, TextResponse) else {}
            ).items():
                ids += array("Q", [request + index]).tobytes()
                counts += array("I", [len(generated)]).tobytes()
                tokens += generated.tobytes()
        return GeneratedTokens(ids, counts), tokens

    def render(self, frontend: int) -> Frames | None:
        """Return the new frames for a frontend, if there are any.

        Of whole answers that is a slice, or several short ones: the rest comes the next times.
        """
        self._in_progress(0)
        if self._core is not None:
            rendered = self._core.render(frontend)
            if rendered.ids:
                self._outgoing.setdefault(frontend, Frames()).put_first(rendered)
            for request in rendered.completed:
                self._end(self._core, request)
        num_bytes = 0
        while num_bytes < SLICE_BYTES and (request := self._bodies.first(frontend)):
            self._in_progress(request)
            num_bytes += self._bodies.write(frontend, self._frames(request))
        self._in_progress(self._bodies.in_progress)
        return self._outgoing.pop(frontend, None)

    def _start(self, id: int, output: StepOutput) -> None:
        """Begin a sequence that generates, in the core where that can write it."""
        plan = self._plans.decode(output.started[id])
        request, times = request_of(id), times_of(id, output)
        if isinstance(plan, AdapterPlan):
            self._frames(request).add(
                request, Head(200, plan.content_type, times), plan.body.encode(), True
            )
            return
        assert isinstance(plan, ResponsePlan)
        if self._core is not None and is_plain(plan):
            is_first = self._core.open(id, plan, template_of(plan))
            if is_first and plan.stream:
                self._frames(request).announce(request, Head(200, EVENT_STREAM, times))
            if not plan.stream or plan.include_usage:
                ending = self._core_responses.setdefault(request, CoreResponse(times))
                ending.add(plan, output.cached.get(id, 0))
            return
        new = TextResponse(plan, self._vocabulary, self._limit, self._interval, self._readings)
        response = self._responses.setdefault(request, new)
        assert isinstance(response, TextResponse)
        response.times = response.times or times
        response.has_begun |= plan.num_delivered is not None
        self._in_progress(request)
        self._openings[id] = response.open(plan, id, output)
        self._in_progress(0)

    def _end(self, core: CoreTexts, request: int) -> None:
        """Write the end of a response in the core, or all of one that does not stream."""
        response = self._core_responses.pop(request)
        plan, texts = response.plans[0], list(core.texts(request, len(response.plans)))
        core.close(request)
        usage = TokenUsage(
            response.num_prompt, sum(text.num_tokens for text in texts), response.num_cached
        )
        renderer = renderer_of(plan)
        if plan.stream:
            self._frames(request).add(request, None, renderer.closing(usage), True)
            return
        plans = sorted(response.plans, key=lambda plan: plan.index)
        answers = [
            Choice(plan.echo + text.text, text.finished)
            for plan, text in zip(plans, texts, strict=True)
        ]
        slices = renderer.whole(answers, usage)
        head = Head(200, JSON, response.times)
        self._bodies.put(SlicedBody(request, head, slices, num_delivered=0, is_long=False))

    def _take_tokens(
        self, id: int, new: list[int], finished: FinishReason | None, output: StepOutput
    ) -> None:
        request = request_of(id)
        response = self._responses.get(request)
        if response is None:  # aborted, or ended by a stop string the engine had not heard of
            return
        assert isinstance(response, TextResponse)
        if not response.has(id - request):  # its earlier tokens went to a predecessor: it is resent
            return
        opening, logprobs = self._openings.pop(id, b""), output.logprobs.get(id, b"")
        if response.has_failed:
            self._let_go(id, response, finished)
            return
        try:
            self._in_progress(request)
            data, stopped_here = response.feed(id - request, new, finished, logprobs)
        except (Exception, CpuLimitExceeded) as error:
            what = f"the response to request {request:x} cannot be written"
            log_failure(log, what, error, response.request_id)
            self._fail(request, response)
            self._let_go(id, response, finished)
            return
        finally:
            self._in_progress(0)
        if stopped_here:
            self._stops.append(StopSequence(id))
        if response.is_complete and not response.streams:
            is_long = response.num_reported_bytes > LONG_BYTES
            num_delivered = response.num_delivered(id - request)
            self._bodies.put(
                SlicedBody(id, response.head(), response.whole(), num_delivered, is_long)
            )
            del self._responses[request]
            return
        self._emit(id, response, opening + data, response.num_delivered(id - request))

    def _fail(self, request: int, response: TextResponse) -> None:
        """End a response with an error. The engine drops its request, and confirms that."""
        error = InternalError()
        response.has_failed = True
        if response.head_sent or response.has_begun:
            self._frames(request).add(request, None, response.failure(error), True)
        else:
            self._frames(request).add(request, *error_body(error, response.plan), True)
        self._stops.append(Abort(request))

    def _fail_elsewhere(self, request: int, plan: Plan, error: RequestError) -> None:
        """End a response with an error for which the engine has aborted the request."""
        response = self._responses.get(request)
        if isinstance(response, TextResponse):
            has_begun, failure = response.head_sent or response.has_begun, response.failure(error)
        elif isinstance(plan, ResponsePlan):
            is_known = self._core is not None and self._core.close(request)
            has_begun = plan.stream and (is_known or plan.num_delivered is not None)
            failure = renderer_of(plan).failure(error)
        else:
            has_begun, failure = False, b""
        if has_begun:
            self._frames(request).add(request, None, failure, True)
        else:
            self._frames(request).add(request, *error_body(error, plan), True)

    def _let_go(self, id: int, response: TextResponse, finished: FinishReason | None) -> None:
        """Handle outputs of a failed response, which is removed at its end."""
        request = request_of(id)
        response.end(id - request, finished)
        if response.is_complete:
            del self._responses[request]

    def _take_embedding(self, id: int, output: StepOutput) -> None:
        plan = self._plans.decode(output.started[id])
        assert isinstance(plan, EmbeddingPlan | SimilarityPlan)
        request = request_of(id)
        response = self._responses.setdefault(request, EmbeddingResponse(plan))
        assert isinstance(response, EmbeddingResponse)
        response.times = response.times or times_of(id, output)
        self._in_progress(request)
        response.take(plan, output.embeddings[id])
        if response.is_complete:
            head = Head(200, response.content_type, response.times)
            is_long = response.num_bytes > LONG_BYTES
            self._bodies.put(
                SlicedBody(id, head, response.whole(), num_delivered=0, is_long=is_long)
            )
            del self._responses[request]
        self._in_progress(0)

    def _emit(self, id: int, response: TextResponse, data: bytes, num_delivered: int) -> None:
        complete = response.is_complete
        if not data and not complete:
            return
        head = None if response.head_sent else response.head()
        response.head_sent = True
        self._frames(id).add(id, head, data, complete, num_delivered)
        if complete:
            del self._responses[request_of(id)]

    def _frames(self, id: int) -> Frames:
        return self._outgoing.setdefault(frontend_of(id), Frames())


def is_plain(plan: ResponsePlan) -> bool:
    """Whether the core can write a response: one of OpenAI's with only text and usage.

    A suspect is written outside: a death in the core is blamed on no request.
    """
    if plan.is_suspect or plan.api not in (Api.CHAT, Api.COMPLETION):
        return False
    tells = (plan.logprobs, plan.prompt_logprobs)
    adds = plan.continuous_usage or plan.return_token_ids or plan.fault is not None
    return tells == (None, None) and plan.best_of == plan.n and not adds and plan.parsing is None


def dead_ones(output: StepOutput) -> frozenset[int]:
    """Return the sequences of a step that end without an answer of their own."""
    dead = (FinishReason.ABORT, FinishReason.REFUSED)
    return frozenset(id for id, _, finished in output.rows() if finished in dead)


def times_of(id: int, output: StepOutput) -> Times | None:
    """Return when a request passed each process: its first token is here, and is being rendered."""
    times = output.times.get(id)
    return times and msgspec.structs.replace(times, rendered=time.monotonic_ns())


def error_body(error: RequestError, plan: Plan | None) -> tuple[Head, bytes]:
    """Return head and body of a response that is nothing but an error."""
    match plan:
        case ResponsePlan(api=Api.MESSAGES):
            body = msgspec.json.encode(anthropic_error(error))
        case EmbeddingPlan(cohere=1 | 2) | SimilarityPlan(is_cohere=True):
            body = msgspec.json.encode(cohere_error(error))
        case EmbeddingPlan() | SimilarityPlan(ranks=True):
            body = msgspec.json.encode(jina_error(error))
        case _:
            body = msgspec.json.encode(openai_error(error))
    return Head(error.status, JSON), body
