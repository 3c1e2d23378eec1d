"""Server information for clients of vLLM and SGLang, under the names it has there."""

from typing import Any

from headrace import __version__
from headrace.board.board import Board
from headrace.board.fields import EngineField, FrontendField
from headrace.config.config import ModelCard


def load(board: Board) -> dict[str, Any]:
    """Return the body of vLLM's `/load`: the number of requests in progress."""
    return {"server_load": sum(slot[FrontendField.ADMITTED] for slot in board.of("frontend"))}


def model_info(card: ModelCard) -> dict[str, Any]:
    """Return the body of SGLang's `/model_info`."""
    return {
        "model_path": card.path,
        "tokenizer_path": card.path,
        "is_generation": card.embedding_size is None,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }


def server_info(card: ModelCard, board: Board) -> dict[str, Any]:
    """Return the body of SGLang's `/server_info`, limited to what applies here."""
    engine = board.slot("engine")
    speed = engine[EngineField.TOKENS_PER_SECOND] if engine[EngineField.RUNNING] else 0
    return {
        "model_path": card.path,
        "tokenizer_path": card.path,
        "served_model_name": card.name,
        "context_length": card.max_model_len,
        "max_total_num_tokens": engine[EngineField.PAGES_TOTAL] * engine[EngineField.PAGE_TOKENS],
        "version": __version__,
        "internal_states": [{"last_gen_throughput": float(speed)}],
    }
