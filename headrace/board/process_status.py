"""Status of each kind of process for `/health` and `/admin`: its work and its queue."""

from headrace.board.backlog import detokenizer_backlog, frontend_backlog, tokenizer_backlog
from headrace.board.board import Board, Field, Slot


def process_status(board: Board, slot: Slot, now_ns: int) -> dict[str, float]:
    """Return what there is to tell of a process, by name; seconds where that ends in `_s`."""
    index = slot.seat.index
    match slot.seat.role:
        case "frontend":
            return {
                "open_requests": slot[Field.OPEN_REQUESTS],
                "connections": slot[Field.CONNECTIONS],
                "queued_messages": max(frontend_backlog(board, index)(), 0),
                "lag_s": round(slot[Field.LAG_NS] / 1e9, 4),
            }
        case "tokenizer":
            return {"queued_bytes": max(tokenizer_backlog(board, index)(), 0)}
        case "engine":
            found: dict[str, float] = {
                "running": slot[Field.RUNNING],
                "waiting": slot[Field.WAITING],
                "steps": slot[Field.STEPS],
            }
            if stepped_ns := slot[Field.STEPPED_NS]:
                found["last_step_s"] = round(max(now_ns - stepped_ns, 0) / 1e9, 2)
            return found
        case "worker":
            return {"steps": slot[Field.COMPUTED_STEPS]}
        case "detokenizer":
            return {
                "open_replies": slot[Field.OPEN_REPLIES],
                "queued_steps": max(detokenizer_backlog(board, index)(), 0),
            }
        case "vision":
            return {"images": slot[Field.ENCODED_IMAGES]}
        case _:
            return {"images": slot[Field.FETCHED_IMAGES]}
