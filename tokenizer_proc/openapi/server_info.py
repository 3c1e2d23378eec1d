"""What clients of vLLM and SGLang ask of a server beside answers, under the names it has there."""

from typing import Any

from headrace import __version__
from headrace.board.board import Board
from headrace.board.fields import EngineField, FrontendField
from headrace.config.config import ModelCard


def load(board: Board) -> dict[str, Any]:
    """Return what vLLM's `/load` tells: requests let in and not answered."""
    return {"server_load": sum(slot[FrontendField.ADMITTED] for slot in board.of("frontend"))}


def model_info(card: ModelCard) -> dict[str, Any]:
    """Return what SGLang's `/model_info` tells."""
    return {
        "model_path": card.path,
        "tokenizer_path": card.path,
        "is_generation": card.pooling is None,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": card.takes_images,
    }


def server_info(card: ModelCard, board: Board) -> dict[str, Any]:
    """Return what SGLang's `/server_info` tells, as far as there is such a thing here."""
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
