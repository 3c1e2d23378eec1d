"""How a process ends that cannot start."""

from headrace.board import Board, Seat
from headrace.config import ModelCard, TokenizerConfig
from headrace.exit_status import ExitStatus
from headrace.process import spawn

DEADLINE_S = 60


def test_what_the_system_refuses_ends_a_start_with_a_word_and_no_traceback() -> None:
    seat = Seat("tokenizer", 0)
    board = Board.create([seat, Seat("frontend", 0)])
    card = ModelCard(
        path="",
        name="",
        max_model_len=1,
        vocab_size=1,
        eos_token_ids=[],
        chat_template=None,
        special_tokens={},
    )
    config = TokenizerConfig(
        run_dir="/missing",
        card=card,
        num_frontends=1,
        num_detokenizers=1,
        seed=0,
        started_at=0,
        num_tokenizers=0,
        max_batch_size=1,
        batch_wait_ms=0,
    )
    assert spawn(seat, config, board, "info").wait(DEADLINE_S) == ExitStatus.SHORT_OF
    words = board.slots[0].last_words
    assert words.startswith("[Errno 2] No such file or directory")
    assert "ipc:///missing/tokenizer-0.sock" in words
