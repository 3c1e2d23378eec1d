"""The labels of a process: the model that it serves, and its seat."""

from collections.abc import Iterator, Sequence

from headrace.board.board import Board, Counts, Seat, Slot
from headrace.board.fields import EngineField
from headrace.config.process_configs import ModelCard

LABELS = ["model_name", "process"]


class ProcessLabels:
    """Values of `LABELS`. What is of no model has an empty `model_name`, where there are several.

    Attributes:
        names: of all models.
    """

    def __init__(self, board: Board, cards: Sequence[ModelCard]) -> None:
        self._board = board
        self.names = [card.name for card in cards]
        self._known: dict[Seat, tuple[str, str]] = {}

    @property
    def shared(self) -> str:
        """The name of the only model, or an empty one."""
        return self.names[0] if len(self.names) == 1 else ""

    def name_of(self, slot: Slot) -> str:
        """Return the name of a process's model."""
        engine = self._board.engine_of(slot)
        return self.shared if engine is None else self.names[engine[EngineField.MODEL]]

    def of(self, slot: Slot) -> tuple[str, str]:
        """Return the values for a process."""
        found = self._known.get(slot.seat)
        if found is None:
            found = self._known[slot.seat] = self.name_of(slot), str(slot.seat)
        return found

    def by_model(self, slot: Slot) -> Iterator[tuple[tuple[str, str], Counts]]:
        """Yield the values and the counts of a process for each model that it serves."""
        if self._board.engine_of(slot) is not None:
            yield self.of(slot), slot
            return
        for model, name in enumerate(self.names):
            yield (name, str(slot.seat)), slot.of_model(model)
