"""Adapters on a GPU: read while steps run, copied into their slot between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine_proc.worker.adapters.adapter_opener import AdaptedModel, open_adapter
from headrace.engine_proc.worker.adapters.factors import AdapterRefused
from headrace.engine_proc.worker.adapters.low_rank import LowRank, LowRanks
from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.cuda.matrices.adapted import PartFactors

REMEDY = (
    "which adapters cannot have on GPUs; use --device cpu, or merge the adapter into the weights"
)


class WrongPlace(AdapterRefused):
    """An adapter changes what none can on GPUs; the text names no file."""


@dataclass(frozen=True)
class DeviceFactors:
    """What an adapter adds to one weight, on the device."""

    a: Tensor  # [rank, terms]
    b: Tensor  # [columns, rank], scaled
    gains: Tensor | None  # [columns], fp32, less 1


class CudaAdapters:
    """The adapters of an executor; see `AdapterSlots`.

    Args:
        parts: where each weight has its factors; see `adapt`.
    """

    def __init__(self, parts: Mapping[str, PartFactors], model: AdaptedModel) -> None:
        self._parts = parts
        self._model = model

    @torch.inference_mode()
    def pack(self, path: Path) -> dict[str, DeviceFactors]:
        """Read an adapter.

        Raises:
            AdapterRefused: it cannot be used, or changes what adapters on GPUs cannot.
        """
        try:
            return self.send(open_adapter(path, self._model))
        except WrongPlace as error:
            raise AdapterRefused(f"{path}: {error}") from None

    def send(self, low_ranks: LowRanks) -> dict[str, DeviceFactors]:
        """Send factors to the device.

        Raises:
            WrongPlace: of a weight that cannot have them.
        """
        sent = {}
        for name, own in low_ranks.items():
            if name not in self._parts:
                raise WrongPlace(f"has factors for {name}, {REMEDY}")
            if own.a is None:
                raise WrongPlace(f"has a whole {name}, {REMEDY}")
            sent[name] = sent_to(self._parts[name].a, own.a, own)
        return sent

    @torch.inference_mode()
    def install(self, slot: int, packed: dict[str, DeviceFactors]) -> None:
        """Put it into a slot, behind the steps that have been launched."""
        for name, part in self._parts.items():
            part.clear(slot)
            if (own := packed.get(name)) is not None:
                part.put(slot, own.a, own.b, own.gains)


def sent_to(like: Tensor, a: Weight, own: LowRank) -> DeviceFactors:
    """Return factors of the type and on the device of `like`."""
    b = torch.from_numpy(own.b.to_float32()) * own.scale
    gains = None if own.gain is None else torch.from_numpy(own.gain - 1).to(like.device)
    return DeviceFactors(torch.from_numpy(a.to_float32()).to(like), b.to(like), gains)
