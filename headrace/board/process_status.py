"""Status of each kind of process for `/health` and `/admin`: its work and its queue."""

from headrace.board.backlog import detokenizer_backlog, frontend_backlog, tokenizer_backlog
from headrace.board.board import Board, Slot
from headrace.board.fields import (
    DetokenizerField,
    EngineField,
    FetcherField,
    FrontendField,
    KvStoreField,
    PlacementField,
    VisionField,
    WorkerField,
)


def process_status(board: Board, slot: Slot, now_ns: int) -> dict[str, float]:
    """Return a process's status values, by name; seconds where a name ends in `_s`."""
    index = slot.seat.index
    match slot.seat.role:
        case "frontend":
            return {
                "open_requests": slot[FrontendField.OPEN_REQUESTS],
                "connections": slot[FrontendField.CONNECTIONS],
                "queued_messages": max(frontend_backlog(board, index)(), 0),
                "lag_s": round(slot[FrontendField.LAG_NS] / 1e9, 4),
            }
        case "tokenizer":
            return {"queued_bytes": max(tokenizer_backlog(board, index)(), 0)}
        case "engine":
            found: dict[str, float] = {
                "model": slot[EngineField.MODEL],  # its place in /v1/models
                "running": slot[EngineField.RUNNING],
                "waiting": slot[EngineField.WAITING],
                "steps": slot[EngineField.STEPS],
            }
            if stepped_ns := slot[EngineField.STEPPED_NS]:
                found["last_step_s"] = round(max(now_ns - stepped_ns, 0) / 1e9, 2)
            return found
        case "worker":
            return {
                "engine": slot[WorkerField.ENGINE],
                "steps": slot[WorkerField.COMPUTED_STEPS],
            }
        case "detokenizer":
            return {
                "open_replies": slot[DetokenizerField.OPEN_RESPONSES],
                "queued_steps": max(detokenizer_backlog(board, index)(), 0),
            }
        case "kv_store":
            return {
                "stored": slot[KvStoreField.STORED],
                "fetched": sum(slot[word] for word in KvStoreField.FOUND.words),
            }
        case "vision":
            return {"images": slot[VisionField.ENCODED_IMAGES]}
        case "placement":
            return {"placed": slot[PlacementField.PLACED]}
        case _:
            return {"images": slot[FetcherField.FETCHED_IMAGES]}
