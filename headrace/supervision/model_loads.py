"""Loads and unloads models: reads the board, asks the policy, gives seats to engines or takes them.

What operators want is on the board as well (`replicas.py`): no engines of a model unload it, some
load it.
"""

import logging
import time
from collections.abc import Callable, Sequence

from headrace.board.backlog import engine_backlog
from headrace.board.board import Board
from headrace.board.fields import EngineField, FrontendField
from headrace.board.model_status import ModelState, engines_of, model_state, num_waiting
from headrace.board.replicas import ModelWishes, count_replicas, load_size, own_engines
from headrace.supervision.engine_groups import EngineGroup
from headrace.supervision.engine_seats import EngineSeats
from headrace.supervision.load_policy import LoadPolicy, ModelDemand

log = logging.getLogger(__name__)


class ModelLoads:
    """The models of a server. Only the supervisor has them.

    Args:
        clock: CLOCK_MONOTONIC in seconds.
    """

    def __init__(
        self,
        board: Board,
        groups: Sequence[EngineGroup],
        seats: EngineSeats,
        policy: LoadPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._names = [group.card.name for group in groups]
        self._least = [group.config.data_parallel_size for group in groups]
        self._seats = seats
        self._policy = policy
        self._clock = clock
        self._wishes = ModelWishes(board, FrontendField.REPLICAS)
        self._engines = [engines_of(board, model) for model in range(len(groups))]
        self._served = list(self._least)  # the last size at which each one has served
        for model, size in enumerate(self._least):
            self._note_size(model, size)
        self._backlogs = [engine_backlog(board, slot.seat.index) for slot in board.of("engine")]

    @property
    def are_settled(self) -> bool:
        """Whether no model comes or goes, and no request waits for one."""
        settled = (ModelState.LOADED, ModelState.UNLOADED)
        return all(
            model_state(self._board, model) in settled and not num_waiting(self._board, model)
            for model in range(len(self._names))
        )

    def look(self) -> list[int]:
        """Take the next steps; return the engines to be started."""
        started: list[int] = []
        for model, count in self._wishes.take().items():
            started += self._grant(model, count)
        for model in range(len(self._names)):
            self._note_served(model)
        for model, least in enumerate(self._least):
            num_engines = max(load_size(self._board, model), self._num_engines(model))
            self._policy.resize(model, num_engines - least)
        demands = [self._demand_of(model) for model in range(len(self._names))]
        decision = self._policy.decide(demands, self._clock())
        for model in decision.unload:
            log.info("%s is unloaded: another model needs its room", self._names[model])
            self._seats.resize(model, 0)
        for model in decision.load:
            log.info("%s is loaded", self._names[model])
            engines = self._seats.resize(model, load_size(self._board, model))
            for engine in engines[:1]:
                self._board.slot("engine", engine).add(EngineField.LOADS)
            started += engines
        return started

    def fail(self, engine: int, error: OSError | None = None) -> None:
        """Note that an engine could not start. Its model has failed if it has no other.

        Args:
            error: why there was no process; otherwise the engine's death tells.
        """
        slot = self._board.slot("engine", engine)
        if error is not None:
            slot.last_death.record(0, f"could not be started: {error}")
        model = slot[EngineField.MODEL]
        self._restore_size(engine, model)
        if model_state(self._board, model) in (ModelState.LOADED, ModelState.LOADING):
            return
        slot[EngineField.RETRY_NS] = round(self._policy.fail(model, self._clock()) * 1e9)
        slot.add(EngineField.FAILED_LOADS)

    def _grant(self, model: int, count: int) -> list[int]:
        """Give a model as many engines as an operator wants; return those to be started."""
        name, state = self._names[model], model_state(self._board, model)
        log.info("admin request: replicas of %s: %d", name, count)
        if not count:
            self._policy.forget(model)
            return self._seats.resize(model, 0)
        self._note_size(model, count)
        if state in (ModelState.LOADED, ModelState.LOADING):
            return self._seats.resize(model, count)
        self._policy.ask(model)
        return []

    def _note_size(self, model: int, size: int) -> None:
        """Tell frontends how many engines a model gets when it is loaded."""
        self._engines[model][0][EngineField.LOAD_SIZE] = size

    def _note_served(self, model: int) -> None:
        """Remember the number of a model's engines, once all of them serve."""
        size = load_size(self._board, model)
        if count_replicas(own_engines(self._board, model)).ready >= size:
            self._served[model] = size

    def _restore_size(self, engine: int, model: int) -> None:
        """Take back a number of engines that could not be reached, as far as they are missing."""
        if load_size(self._board, model) > self._served[model]:
            own = own_engines(self._board, model)
            num_staying = sum(slot in own for slot in self._seats.staying(engine))
            self._note_size(model, max(self._served[model], num_staying))

    def _num_engines(self, model: int) -> int:
        """Return how many engines a model has of this server, those that leave included."""
        return sum(not self._board.is_vacant(slot) for slot in own_engines(self._board, model))

    def _demand_of(self, model: int) -> ModelDemand:
        return ModelDemand(
            state=model_state(self._board, model),
            num_waiting=num_waiting(self._board, model),
            is_busy=any(
                slot[EngineField.IS_BUSY] or self._backlogs[slot.seat.index]()
                for slot in self._engines[model]
            ),
        )
