"""The tokenizer service: takes requests in batches, and sends the outcomes around the ring.

A lone request goes at once. If others wait, a batch takes them until it is full or its time is
over. It never waits for requests that have not come. A request that waits for something else is
laid aside, and looked at again with the next batch. One that was here when a process died is
handled alone, so that it is known what kills. One whose client has left goes no further.
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from headrace.board.backlog import tokenizer_backlog
from headrace.board.board import Timing
from headrace.board.fields import TokenizerField
from headrace.config.process_configs import TokenizerConfig
from headrace.ipc.frontend_links import FrontendLinks
from headrace.ipc.messages import (
    GenerateRequest,
    Head,
    HttpRequest,
    ResponseFrames,
    ToTokenizer,
    frontend_of,
)
from headrace.ipc.router import HUGE_BODY_BYTES
from headrace.ipc.sockets import Inbox
from headrace.runtime.process import Context
from headrace.tokenizer_proc.encoding.chat_template import TemplateTooSlow
from headrace.tokenizer_proc.encoding.encoder import Encoder
from headrace.tokenizer_proc.images.images import Images
from headrace.tokenizer_proc.jobs.aborts import Aborts
from headrace.tokenizer_proc.jobs.job import Dropped, Job
from headrace.tokenizer_proc.jobs.stages import (
    Body,
    Ids,
    ImmediateResponse,
    Sequences,
    Stages,
    error_response,
)
from headrace.tokenizer_proc.load_queue import Refusal, RoutedRequest
from headrace.tokenizer_proc.offload_pool import OffloadPool
from headrace.tokenizer_proc.replica_router import ReplicaRouter
from headrace.tokenizer_proc.routed_models import RoutedModel, RoutedModels

TEMPLATE_CPU_S = 0.1  # of one that others wait for; a child process has more
POLL_INTERVAL_MS = 1  # between looks at what is laid aside,
LOADING_MS = 5  # and at whether a model that requests wait for is loaded
LoadImages = Callable[[TokenizerConfig, Context, Aborts, Encoder], Images]


log = logging.getLogger(__name__)


class Service:
    """A tokenizer process at work."""

    def __init__(
        self,
        config: TokenizerConfig,
        context: Context,
        inbox: Inbox[ToTokenizer],
        aborts: Aborts,
        max_batch_size: int,
        max_wait_s: float,
        load_images: LoadImages | None = None,
    ) -> None:
        self._slot = context.slot
        self._inbox = inbox
        self._aborts = aborts
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_s
        self._aside: list[Job] = []
        self._suspects: list[tuple[HttpRequest, Body]] = []
        self._backlog = tokenizer_backlog(context.board, context.index)
        self._offload = None
        load: Callable[[Encoder], Images] | None = None
        if load_images is None:
            self._offload = OffloadPool(config, context.log_level, context.log_format)
        else:
            load = partial(load_images, config, context, aborts)
        patience_s = None if self._offload is None else TEMPLATE_CPU_S
        self.models = RoutedModels(config, context.board, patience_s, load)
        self._images = self.models[0].images  # they go with one model alone
        for model in self.models:
            if model.lacks_tools and context.index == 0:
                log.info(
                    "%s: the chat template has no place for tools: a message describes them, and "
                    "calls are read as --tool-call-parser hermes",
                    model.name,
                )
        self._engines = ReplicaRouter(config, context.board, context.slot)
        self._frontends = FrontendLinks(
            config.run_dir, config.num_frontends, context.board, context.slot
        )

    def load_fast(self) -> None:
        """Load what makes encoding fast; another thread may, while requests are handled."""
        for model in self.models:
            model.encoder.load_fast()

    def show_images(self) -> None:
        """Publish the images on the board."""
        if self._images is not None:
            self._images.show()

    def handle(self, timeout_ms: int) -> bool:
        """Handle the requests that wait, or return after `timeout_ms` without any.

        Returns:
            Whether there were some.
        """
        if self._images is not None:
            self._images.take_fetched()
        jobs = self._receive(min(timeout_ms, self._poll_ms or timeout_ms))
        self._engines.follow()
        if self._engines.are_waiting:
            self._engines.drop(lambda id: id in self._aborts)
            self._refuse(self._engines.send_waiting())
        elif not (jobs or self._aside or self._suspects):
            self._backlog.settle_idle()
        if not (jobs or self._aside or self._suspects):
            return False
        self._drop_abandoned(self._aside)
        jobs += self._aside
        self._aside = [job for job in jobs if job.is_waiting]
        jobs = [job for job in jobs if not job.is_waiting]
        for start in range(0, len(jobs), self._max_batch_size):
            self._work(jobs[start : start + self._max_batch_size])
        for request, body in self._suspects:
            self._slot[TokenizerField.AT_HAND] = request.id
            self._work([self._job(request, body)])
            self._slot[TokenizerField.AT_HAND] = 0
        self._suspects.clear()
        return True

    @property
    def _poll_ms(self) -> int | None:
        """How long to wait for a message where other things are waited for, too."""
        if self._aside:
            return POLL_INTERVAL_MS
        return LOADING_MS if self._engines.are_waiting else None

    def _work(self, jobs: list[Job]) -> None:
        """Run the jobs of a batch as far as they go, and lay aside those that wait."""
        while ready := self._ready(jobs):
            self.models.encode(ready)
        self._aside += [job for job in jobs if job.is_waiting]
        jobs = [job for job in jobs if job.outcome is not None]
        for job in jobs:
            if isinstance(job.outcome, ImmediateResponse):
                self._respond(job.request, job.outcome)
        routed = [RoutedRequest(job.model, job.request, self._messages(job)) for job in jobs]
        self._refuse(self._engines.send(routed))
        self._count(jobs)

    def _ready(self, jobs: list[Job]) -> list[Job]:
        """Return which jobs go on now."""
        jobs = [job for job in jobs if job.outcome is None]
        self._drop_abandoned(jobs)
        return [job for job in jobs if job.outcome is None and not job.is_waiting]

    def _drop_abandoned(self, jobs: list[Job]) -> None:
        """Have those of unfinished jobs come to nothing whose clients have left."""
        if jobs:
            self._aborts.look()
        for job in jobs:
            if job.request.id in self._aborts:
                job.drop()

    def _receive(self, timeout_ms: int) -> list[Job]:
        received = self._inbox.receive(timeout_ms)
        end = time.monotonic() + self._max_wait_s
        self._aborts.look()
        jobs: list[Job] = []
        while received is not None:
            request, body = received
            if request.is_suspect:
                self._suspects.append((request, body))
            else:
                jobs.append(self._job(request, body))
            if len(jobs) == self._max_batch_size or time.monotonic() >= end:
                break
            received = self._inbox.receive(0)
        return jobs

    def _job(self, request: HttpRequest, body: Body) -> Job:
        job = self.models.job(request, body, self._stages)
        if request.id in self._aborts:
            job.drop()
        else:
            job.begin()
        return job

    def _stages(self, model: RoutedModel, request: HttpRequest, body: Body) -> Stages:
        """Handle a request; one that takes long is handled by a child process.

        Raises:
            RequestError: it is refused.
        """
        if self._offload is None:
            return (yield from model.routes.handle(request, body))
        if len(body) < HUGE_BODY_BYTES:
            with contextlib.suppress(TemplateTooSlow):
                return (yield from model.routes.handle(request, body))
        return (yield from self._offload.handle(request, body))

    def _messages(self, job: Job) -> list[tuple[GenerateRequest, Ids]]:
        """Return the messages of a request to the engine."""
        if not isinstance(job.outcome, Sequences):
            return []
        times, outcome = job.times, job.outcome
        request_id = job.request.request_id
        requests = [
            msgspec.structs.replace(request, times=times, request_id=request_id)
            for request in outcome.requests
        ]
        return list(zip(requests, outcome.prompts, strict=True))

    def _count(self, jobs: list[Job]) -> None:
        """Count the completed work on the board."""
        slot = self._slot
        for job in jobs:
            counts = slot.of_model(job.model)
            match outcome := job.outcome:
                case ImmediateResponse():
                    slot.add(TokenizerField.REFUSED, outcome.status >= 400)
                case Sequences():
                    counts.add(TokenizerField.PROMPT_TOKENS, sum(map(len, outcome.prompts)))
                    for _, same in itertools.groupby(outcome.prompts, key=id):
                        counts.histogram(Timing.N).observe(len(list(same)))
                case Dropped():
                    slot.add(TokenizerField.ABANDONED)
        slot.add(TokenizerField.HANDLED, len(jobs))
        slot.add(TokenizerField.HANDLED_BYTES, sum(job.num_bytes + 1 for job in jobs))

    def _refuse(self, refusals: list[Refusal]) -> None:
        """Answer requests that no engine takes."""
        for (_, request, prompts), error in refusals:
            if self._images is not None:
                for sequence, _ in prompts:
                    self._images.take_back(sequence.images)
            self._respond(request, error_response(error, request.path))
            self._slot.add(TokenizerField.REFUSED)

    def _respond(self, request: HttpRequest, response: ImmediateResponse) -> None:
        """Send a response that is complete."""
        head = Head(response.status, response.content_type, headers=response.headers)
        frames = ResponseFrames.of({request.id: head}, [request.id], [len(response.body)], [True])
        self._frontends.send(frontend_of(request.id), frames, response.body)

    def close(self) -> None:
        """Drop all links."""
        self._engines.close()
        self._frontends.close()
