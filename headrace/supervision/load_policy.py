"""Which models are loaded, which one waits for room, and which one makes it. Pure.

A model that is asked for and is not loaded joins a queue. The first one gets the next room. Where
there is none, the model leaves that was used least recently. A busy one leaves, too, once it has
served for as long as its load took. So loads take half of the time at most. A model for which
requests wait does not leave before they run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.board.model_status import ModelState

FIRST_RETRY_S = 5.0  # after a load that failed; doubled with each further one
LAST_RETRY_S = 300.0
ROUNDING = 1e-9  # of sums of shares


class ModelDemand(NamedTuple):
    """A model as it is now."""

    state: ModelState
    num_waiting: int  # sequences that wait for it
    is_busy: bool  # it has requests


class LoadDecision(NamedTuple):
    """Models to be loaded now, and to be unloaded."""

    load: list[int]
    unload: list[int]


@dataclass
class ModelHistory:
    """What is remembered of a model. Times are in seconds, by one clock."""

    used_at: float = float("-inf")  # when it last had requests
    loading_since: float | None = None
    loaded_at: float | None = None
    load_s: float = 0.0  # that its last load took
    is_asked: bool = False  # by an operator
    delay_s: float = FIRST_RETRY_S  # after a failure that comes next
    retry_at: float = float("-inf")


class LoadPolicy:
    """The decisions for the models of a server, by their places.

    Args:
        shares: of the room, that each model takes.
        limit: the room.
        growths: of the room, that each further engine of a model takes. None is nothing.
    """

    def __init__(
        self, shares: Sequence[float], limit: float, growths: Sequence[float] | None = None
    ) -> None:
        self._least = shares
        self._growths = growths or [0.0] * len(shares)
        self._shares = [min(share, limit) for share in shares]  # the largest one fits alone
        self._limit = limit + ROUNDING
        self._histories = [ModelHistory() for _ in shares]
        self._queue: list[int] = []  # that wait for room

    @property
    def num_first(self) -> int:
        """How many models fit together, from the first one on. A server starts with these."""
        fitting = (
            count
            for count in range(len(self._shares) + 1)
            if sum(self._shares[:count]) <= self._limit
        )
        return max(fitting)

    def resize(self, model: int, num_further: int) -> None:
        """Note how many engines a model has beyond those of its flags."""
        share = self._least[model] + self._growths[model] * num_further
        self._shares[model] = min(share, self._limit - ROUNDING)

    def ask(self, model: int) -> None:
        """Have a model loaded as if a request waited for it, failures or not."""
        history = self._histories[model]
        history.is_asked, history.delay_s, history.retry_at = True, FIRST_RETRY_S, float("-inf")

    def forget(self, model: int) -> None:
        """Have a model loaded for requests alone."""
        self._histories[model].is_asked = False

    def fail(self, model: int, now: float) -> float:
        """Note that a model could not be loaded; return when it may be tried again."""
        history = self._histories[model]
        history.is_asked, history.loading_since = False, None
        history.retry_at = now + history.delay_s
        history.delay_s = min(2 * history.delay_s, LAST_RETRY_S)
        return history.retry_at

    def decide(self, models: Sequence[ModelDemand], now: float) -> LoadDecision:
        """Return what is to be loaded and unloaded now."""
        for model, demand in enumerate(models):
            self._note(model, demand, now)
        self._join_queue(models, now)
        free = self._limit - self._taken(models, but=(ModelState.UNLOADED,))
        later = self._limit - self._taken(models, but=(ModelState.UNLOADED, ModelState.UNLOADING))
        candidates = self._candidates(models, now)
        load: list[int] = []
        unload: list[int] = []
        for model in self._queue:
            share = self._shares[model]
            while later < share and candidates:
                unload.append(candidates.pop(0))
                later += self._shares[unload[-1]]
            later -= share
            if later < 0 or free < share or models[model].state is not ModelState.UNLOADED:
                free = 0.0  # the first one is served first
                continue
            free -= share
            load.append(model)
        return LoadDecision(load, unload)

    def _note(self, model: int, demand: ModelDemand, now: float) -> None:
        """Remember what a model has done."""
        history = self._histories[model]
        match demand.state:
            case ModelState.LOADING:
                if history.loading_since is None:
                    history.loading_since = now
            case ModelState.LOADED:
                if history.loaded_at is None:
                    began = now if history.loading_since is None else history.loading_since
                    history.loaded_at, history.load_s = now, now - began
                    history.used_at, history.delay_s = now, FIRST_RETRY_S
                if demand.is_busy or demand.num_waiting:
                    history.used_at = now
                history.is_asked, history.loading_since = False, None
            case _:
                history.loaded_at = history.loading_since = None

    def _join_queue(self, models: Sequence[ModelDemand], now: float) -> None:
        """Have models queue that are asked for and not loaded, in the order of their coming."""
        wanted = [
            model
            for model, demand in enumerate(models)
            if demand.state in (ModelState.UNLOADED, ModelState.UNLOADING)
            and self._is_wanted(model, demand, now)
        ]
        self._queue = [model for model in self._queue if model in wanted]
        self._queue += [model for model in wanted if model not in self._queue]

    def _is_wanted(self, model: int, demand: ModelDemand, now: float) -> bool:
        history = self._histories[model]
        return history.is_asked or (demand.num_waiting > 0 and now >= history.retry_at)

    def _taken(self, models: Sequence[ModelDemand], but: tuple[ModelState, ...]) -> float:
        """Return the room of models in other states than some."""
        return sum(
            share
            for share, demand in zip(self._shares, models, strict=True)
            if demand.state not in but
        )

    def _candidates(self, models: Sequence[ModelDemand], now: float) -> list[int]:
        """Return the models that may leave: idle ones, then those that have served for longest."""

        def rank(model: int) -> tuple[bool, float, float]:
            history = self._histories[model]
            assert history.loaded_at is not None
            return models[model].is_busy, history.used_at, history.loaded_at

        leaving = [
            model for model, demand in enumerate(models) if self._may_leave(model, demand, now)
        ]
        return sorted(leaving, key=rank)

    def _may_leave(self, model: int, demand: ModelDemand, now: float) -> bool:
        history = self._histories[model]
        if demand.state is not ModelState.LOADED or demand.num_waiting:
            return False
        assert history.loaded_at is not None
        return not demand.is_busy or now - history.loaded_at >= history.load_s
