"""Server information for clients of vLLM and SGLang, under the names it has there."""

from headrace import __version__
from headrace.board.board import Board
from headrace.board.fields import EngineField, FrontendField
from headrace.config.process_configs import ModelCard
from headrace.response_bodies.server import ModelInfo, ServerInfo, ServerLoad


def load(board: Board) -> ServerLoad:
    """Return the body of vLLM's `/load`: the number of requests in progress."""
    admitted = (slot[FrontendField.ADMITTED] for slot in board.of("frontend"))
    return ServerLoad(server_load=sum(admitted))


def model_info(card: ModelCard) -> ModelInfo:
    """Return the body of SGLang's `/model_info`."""
    return ModelInfo(
        model_path=card.path,
        tokenizer_path=card.tokenizer_path,
        is_generation=card.pooling is None,
        preferred_sampling_params=None,
        weight_version="default",
        has_image_understanding=card.takes_images,
    )


def server_info(card: ModelCard, board: Board) -> ServerInfo:
    """Return the body of SGLang's `/server_info`, limited to what applies here.

    It tells of the server's first model.
    """
    engines = [engine for engine in board.of("engine") if engine[EngineField.MODEL] == 0]
    speed = sum(
        engine[EngineField.TOKENS_PER_SECOND] for engine in engines if engine[EngineField.RUNNING]
    )
    num_tokens = sum(
        engine[EngineField.PAGES_TOTAL] * engine[EngineField.PAGE_TOKENS] for engine in engines
    )
    return ServerInfo(
        model_path=card.path,
        tokenizer_path=card.tokenizer_path,
        served_model_name=card.name,
        context_length=card.max_model_len,
        max_total_num_tokens=num_tokens,
        version=__version__,
        internal_states=[{"last_gen_throughput": float(speed)}],
    )
