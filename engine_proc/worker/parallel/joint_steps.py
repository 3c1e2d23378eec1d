"""Steps that all ranks of a group take, or none: a rank that fails alone would block the rest."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from headrace.errors import HeadraceError

T = TypeVar("T")


class StepPeers(Protocol):
    """The workers of a model, on one host, over whatever they can talk."""

    rank: int
    world: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gives, by rank. All call it; lengths may differ."""


class StepRefused(HeadraceError):
    """A step failed on a rank, so it fails on all; the text has the rank and the reason."""


class RankResult(msgspec.Struct, array_like=True, frozen=True):
    """The result of a step on one rank: its encoded value, or the error."""

    value: bytes = b""
    error: str = ""


def jointly(peers: StepPeers, what: str, step: Callable[[], T], kind: type[T]) -> list[T]:
    """Take a step on all ranks and return the result of each.

    Args:
        kind: of what it gives.

    Raises:
        Refused: on all ranks, if it failed on any.
    """
    try:
        answer = RankResult(msgspec.msgpack.encode(step()))
    except Exception as error:
        answer = RankResult(error=f"{type(error).__name__}: {error}")
    answers = [
        msgspec.msgpack.decode(data, type=RankResult)
        for data in peers.gather(msgspec.msgpack.encode(answer))
    ]
    errors = [f"rank {rank}: {theirs.error}" for rank, theirs in enumerate(answers) if theirs.error]
    if errors:
        raise StepRefused(f"{what}: {'; '.join(errors)}")
    return [msgspec.msgpack.decode(theirs.value, type=kind) for theirs in answers]


def refuse(peers: StepPeers, what: str, error: BaseException) -> None:
    """Report to the other ranks that this rank cannot take a step."""

    def fail() -> None:
        raise error

    try:
        jointly(peers, what, fail, type(None))
    except StepRefused:
        return


def meet(peers: StepPeers) -> None:
    """Wait until all ranks have come here."""
    peers.gather(b"")
