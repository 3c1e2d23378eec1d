"""Requests that wait for an engine of their model, in the order in which they came.

One that serves gets them at once. A model that is loaded, or whose engine is replaced, has none for
some time.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from headrace.board.board import Board, Slot
from headrace.board.fields import TokenizerField
from headrace.board.model_status import num_waiting
from headrace.errors import QueueFull, RequestError
from headrace.ipc.messages import GenerateRequest, HttpRequest
from headrace.tokenizer_proc.jobs.stages import Ids


class RoutedRequest(NamedTuple):
    """The sequences of a request, for an engine of its model."""

    model: int  # its place among the server's
    request: HttpRequest
    prompts: list[tuple[GenerateRequest, Ids]]


class Refusal(NamedTuple):
    """A request that does not wait any longer, and why."""

    routed: RoutedRequest
    error: RequestError


class LoadQueue:
    """The waiting requests of a tokenizer process, by model.

    Args:
        slot: of this process. It tells how many sequences wait.
        limits: sequences that wait for each model, in all tokenizer processes. 0 is no limit.
    """

    def __init__(
        self,
        board: Board,
        slot: Slot,
        num_models: int,
        limits: Sequence[int],
    ) -> None:
        self._board = board
        self._slot = slot
        self._limits = limits or [0] * num_models
        self._queues: list[deque[RoutedRequest]] = [deque() for _ in range(num_models)]

    def __bool__(self) -> bool:
        return any(self._queues)

    def __getitem__(self, model: int) -> deque[RoutedRequest]:
        """The requests for a model."""
        return self._queues[model]

    @property
    def models(self) -> set[int]:
        """The models that requests wait for."""
        return {model for model, queue in enumerate(self._queues) if queue}

    def add(self, routed: RoutedRequest) -> None:
        """Have a request wait.

        Raises:
            QueueFull: too many do. One that was accepted before is not refused.
        """
        limit = self._limits[routed.model]
        if 0 < limit <= num_waiting(self._board, routed.model) and not routed.request.resumes:
            raise QueueFull
        self._queues[routed.model].append(routed)
        self._count(routed.model)

    def take(self, model: int, send: Callable[[RoutedRequest], bool]) -> None:
        """Send requests for a model until one cannot be sent. It waits, with those after it."""
        queue = self._queues[model]
        while queue and send(queue[0]):
            queue.popleft()
        self._count(model)

    def fail(self, model: int, error: RequestError) -> list[Refusal]:
        """Refuse what waits for a model."""
        refusals = [Refusal(routed, error) for routed in self._queues[model]]
        self._queues[model].clear()
        self._count(model)
        return refusals

    def drop(self, is_aborted: Callable[[int], bool]) -> None:
        """Forget requests whose clients have left.

        Those with images go to the engine, which releases them.
        """
        for model, queue in enumerate(self._queues):
            kept = [one for one in queue if has_images(one) or not is_aborted(one.request.id)]
            if len(kept) < len(queue):
                self._queues[model] = deque(kept)
                self._count(model)

    def _count(self, model: int) -> None:
        """Publish how many sequences wait."""
        self._slot[TokenizerField.WAITING + model] = num_sequences(self._queues[model])


def num_sequences(requests: Iterable[RoutedRequest]) -> int:
    """Return how many sequences some requests have."""
    return sum([len(one.prompts) for one in requests])


def has_images(routed: RoutedRequest) -> bool:
    """Whether a request has images, which lie in the arena."""
    return any(request.images for request, _ in routed.prompts)
