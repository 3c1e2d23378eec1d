"""Requests of operators for more or fewer replicas of a model, or for its sleep.

The supervisor acts on the former, the model's engines act on the latter.
"""

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.board.board import Board, Slot
from headrace.board.fields import EngineField
from headrace.board.model_status import ModelState, engines_of, is_asleep, model_state
from headrace.board.replacements import is_ready
from headrace.board.replicas import (
    ReplicaCount,
    adapter_bytes,
    count_replicas,
    load_size,
    own_engines,
    wish_replicas,
    wish_sleep,
)
from headrace.config.process_configs import ModelCapacity
from headrace.frontend.http.rejections import Rejection

GIB = 1 << 30
NUMBER = re.compile("[0-9]{1,9}")
USAGE = "/admin/replicas takes replicas=NUMBER and, of several models, model=NAME"
ALL_REMOTE = "all engines are of --remote-engines, and there is no seat for another"
NO_MODEL = Rejection(
    404, "there is no such model; see /v1/models", "invalid_request_error", "model_not_found"
)


NOT_LOADED = Rejection(
    409,
    "only a model that is loaded sleeps; /v1/models has the status of each",
    "invalid_request_error",
    "model_not_loaded",
)
SLEEPLESS = Rejection(
    409,
    "the model has pages that live and die with its workers, as on GPUs and in transformers' "
    "modules, or engines on other machines; without such engines unload it",
    "invalid_request_error",
    "model_cannot_sleep",
)
NOT_HERE = Rejection(
    409,
    "the model has engines on other machines, which are not unloaded; /admin/replicas changes "
    "how many the server starts",
    "invalid_request_error",
    "model_cannot_unload",
)


class ModelAction(enum.StrEnum):
    """What is to become of a model."""

    LOAD = "load"
    UNLOAD = "unload"
    SLEEP = "sleep"


@dataclass(frozen=True)
class AdminResponse:
    """An answer, as JSON."""

    status: int
    body: bytes


class ReplicaRequests:
    """The replicas of all models.

    Args:
        slot: of this frontend, which writes what is wanted.
        memory_limit: returns the bytes of memory of this machine, or its container.
    """

    def __init__(
        self,
        models: Sequence[ModelCapacity],
        board: Board,
        slot: Slot,
        memory_limit: Callable[[], int],
    ) -> None:
        self._models = models
        self._board = board
        self._slot = slot
        self._memory_limit = memory_limit

    def status(self) -> bytes:
        """Return how many engines each model has, as JSON."""
        entries = [self._entry(model) for model in range(len(self._models))]
        return f'{{"models":[{",".join(entries)}]}}'.encode()

    def handle(self, asked: Sequence[tuple[str, str]]) -> AdminResponse | Rejection:
        """Note how many engines of a model are wanted, or return why there cannot be as many.

        Args:
            asked: the parameters of the query.
        """
        fields = dict(asked)
        if len(fields) < len(asked) or not {"replicas"} <= fields.keys() <= {"replicas", "model"}:
            return invalid(400, USAGE)
        names = [model.name for model in self._models]
        name = fields.get("model", names[0] if len(names) == 1 else "")
        if not name:
            return invalid(400, USAGE)
        if name not in names:
            return NO_MODEL
        model = names.index(name)
        most, text = len(own_engines(self._board, model)), fields["replicas"]
        count = int(text) if NUMBER.fullmatch(text) else 0
        if not 1 <= count <= most:
            allowed = f"replicas must be 1 to {most}" if most else ""
            why = self._models[model].why_fixed or ("" if most else ALL_REMOTE)
            return invalid(400, "; ".join(filter(None, (allowed, why))))
        if (rejection := self._refuse_memory(model, count)) is not None:
            return rejection
        wish_replicas(self._slot, model, count)
        return AdminResponse(202, self._entry(model, count).encode())

    def apply(self, name: str, action: ModelAction) -> AdminResponse | Rejection:
        """Note what is to become of a model, or return why it cannot.

        What is loaded keeps its replicas, what is loaded again has as many as before.
        """
        names = [model.name for model in self._models]
        if name not in names:
            return NO_MODEL
        model = names.index(name)
        if action is ModelAction.SLEEP:
            return self._put_to_sleep(model)
        count = 0
        is_elsewhere = any(map(self._board.is_remote, engines_of(self._board, model)))
        if action is ModelAction.LOAD:
            count = self._count(model).wanted or load_size(self._board, model)
            wish_sleep(self._slot, model, False)
        elif is_elsewhere:
            return NOT_HERE
        if count or not is_elsewhere:
            wish_replicas(self._slot, model, count)
        return AdminResponse(202, self._entry(model, count).encode())

    def apply_alone(self, action: ModelAction) -> AdminResponse | Rejection:
        """Do as `apply` with the one model that there is."""
        if len(self._models) > 1:
            return invalid(400, f"of several models one is named: /admin/models/NAME/{action}")
        return self.apply(self._models[0].name, action)

    def sleep_status(self) -> bytes:
        """Return whether no model has pages, as vLLM's JSON: all sleep, or are unloaded."""
        awake = any(
            model_state(self._board, model) is not ModelState.UNLOADED
            and not is_asleep(self._board, model)
            for model in range(len(self._models))
        )
        return f'{{"is_sleeping":{"false" if awake else "true"}}}'.encode()

    def _count(self, model: int) -> ReplicaCount:
        """Return how many engines a model has that this server starts."""
        return count_replicas(own_engines(self._board, model))

    def _put_to_sleep(self, model: int) -> AdminResponse | Rejection:
        """Note that a model is to sleep."""
        if model_state(self._board, model) is not ModelState.LOADED:
            return NOT_LOADED
        ready = filter(is_ready, engines_of(self._board, model))
        if not all(slot[EngineField.CAN_SLEEP] for slot in ready):
            return SLEEPLESS
        wish_sleep(self._slot, model, True)
        return AdminResponse(202, self._entry(model).encode())

    def _refuse_memory(self, model: int, count: int) -> Rejection | None:
        """Return why there is no memory for so many engines of a model, or None."""
        found = [self._count(place) for place in range(len(self._models))]
        if count <= found[model].wanted:
            return None
        counts = [each.wanted + each.leaving for each in found]  # those that leave have theirs yet
        counts[model] = max(counts[model], count)
        num_bytes = sum(
            count * (each.replica_bytes + adapter_bytes(self._board, place))
            for place, (count, each) in enumerate(zip(counts, self._models, strict=True))
        )
        limit = self._memory_limit()
        if num_bytes <= limit:
            return None
        return Rejection(
            409,
            f"{count} replicas may take {num_bytes / GIB:.1f} GiB with all else that is served, of "
            f"{limit / GIB:.1f} GiB of memory; a lower --kv-cache-memory-bytes leaves room",
            "invalid_request_error",
            "not_enough_memory",
        )

    def _entry(self, model: int, wanted: int | None = None) -> str:
        """Return a model's numbers as JSON. `wanted` are those that the board does not show yet."""
        count = self._count(model)
        return (
            f'{{"model":{self._models[model].encoded_name},'
            f'"replicas":{count.wanted if wanted is None else wanted},"ready":{count.ready},'
            f'"leaving":{count.leaving},"max_replicas":{len(own_engines(self._board, model))}}}'
        )


def invalid(status: int, message: str, allow: str = "") -> Rejection:
    """Return the refusal of what cannot be asked."""
    return Rejection(status, message, "invalid_request_error", "invalid_request", allow=allow)
