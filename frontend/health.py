"""Health checks: answers of `/health`, `/ready` and `/startup`.

Orchestrators look at the status; people at the rest. All of it is read off the board, so it is
there when nothing else answers. Names have no characters that JSON would escape.
"""

from collections.abc import Collection
from dataclasses import dataclass

from headrace.board.board import Board, Seat, Slot, State
from headrace.board.fields import CommonField, EngineField, Seating
from headrace.board.process_status import process_status
from headrace.routes import READY, STARTUP, Lane, routes_of

OF_ENGINES = ("engine", "worker")  # roles that a replica takes the place of
PATHS = frozenset(path for route in routes_of(Lane.FRONTEND) for path in route.paths)


@dataclass(frozen=True)
class HealthResponse:
    """An answer."""

    status: int
    body: bytes


def health_of(
    board: Board, path: str, is_draining: bool, now_ns: int, since_ns: int = 0
) -> HealthResponse:
    """Return the answer to one of `PATHS`.

    `/health` is 503 when a process does not serve. `/ready` is, too, unless the process belongs to
    an engine and another one of the model is whole. Nor is it for `placement`, by which no request
    goes, where an engine is whole. While the server stops `/ready` is 503.
    `/startup` is 503 only until all processes that the server starts with have been ready.

    Args:
        since_ns: since when this process has been awake (`wake_clock.py`).
    """
    slots = board.occupied()
    found = [(slot, slot.unhealthy_reason(now_ns, since_ns)) for slot in slots]
    faults = {slot.seat: why for slot, why in found if why is not None}
    if path == STARTUP and all(has_started(board, slot) for slot in slots):
        faults.clear()
    elif path == READY:
        spared = spared_engines(board, faults.keys())
        faults = {
            seat: why
            for seat, why in faults.items()
            if engine_index(board, seat) not in spared and not (spared and seat.role == "placement")
        }
    reasons = list(faults.values())
    if path == READY and is_draining:
        reasons.append("the server stops when open requests are answered")
    progress = (
        min((slot[CommonField.PROGRESS] for slot in board.occupied("worker")), default=1000) / 1000
    )
    told = ",".join(f'"{reason}"' for reason in reasons)
    processes = ",".join(process_of(board, slot, now_ns) for slot in slots)
    body = (
        f'{{"status":"{"unhealthy" if reasons else "ok"}","reasons":[{told}],'
        f'"loaded":{progress:.3f},"processes":[{processes}]}}'
    )
    return HealthResponse(503 if reasons else 200, body.encode("ascii"))


def engine_index(board: Board, seat: Seat) -> int | None:
    """Return the index of the engine that a process belongs to, and may fail with."""
    engine = board.engine_of(board.slot(seat.role, seat.index)) if seat.role in OF_ENGINES else None
    return None if engine is None else engine.seat.index


def spared_engines(board: Board, faulty: Collection[Seat]) -> set[int]:
    """Return the indices of all engines whose model has one without a fault."""
    ill = {engine_index(board, seat) for seat in faulty}
    whole = {
        slot[EngineField.MODEL]
        for slot in board.of("engine")
        if slot[EngineField.SEATING] != Seating.VACANT and slot.seat.index not in ill
    }
    return {s.seat.index for s in board.of("engine") if s[EngineField.MODEL] in whole}


def has_started(board: Board, slot: Slot) -> bool:
    """Whether a process has become ready in a seat, whatever became of it.

    An engine that operators have added is no part of the start.
    """
    engine = board.engine_of(slot)
    if engine is not None and engine[EngineField.IS_SPARE]:
        return True
    return slot[CommonField.STATE] in (State.READY, State.DEAD) or slot[CommonField.STARTS] > 1


def process_of(board: Board, slot: Slot, now_ns: int) -> str:
    """Return a process's status as JSON."""
    restarts = max(slot[CommonField.STARTS], 1) - 1
    found = process_status(board, slot, now_ns)
    details = "".join(f',"{name}":{value}' for name, value in found.items())
    return (
        f'{{"process":"{slot.seat}","state":"{State(slot[CommonField.STATE]).name.lower()}",'
        f'"silent_s":{slot.silent_s(now_ns):.2f},"restarts":{restarts}{details}}}'
    )
