"""An adapter (LoRA) as the engine sees it: whether workers have it, and whether it may run."""

from dataclasses import dataclass

from headrace.ipc.messages import AdapterSource

NO_SLOT = -1


@dataclass(eq=False, slots=True)
class PooledAdapter:
    """An adapter that sequences use, or that is loaded."""

    source: AdapterSource
    slot: int = NO_SLOT
    is_loaded: bool = False
    num_users: int = 0  # sequences here, waiting or running
    has_seat: bool = False
    has_run: bool = False  # since it has its seat
    is_closing: bool = False
    num_deaths: int = 0

    @property
    def is_open(self) -> bool:
        """Whether further sequences of it may begin to run."""
        return self.is_loaded and self.has_seat and not self.is_closing

    @property
    def is_loading(self) -> bool:
        """Whether workers have been asked for it and have not answered."""
        return self.slot != NO_SLOT and not self.is_loaded


def slot_of(adapter: PooledAdapter | None) -> int:
    """Return the slot of a sequence's adapter, or none."""
    return NO_SLOT if adapter is None else adapter.slot
