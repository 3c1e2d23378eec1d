"""A frontend whose beats fail says why, and ends."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from headrace.board import Board, Field, Seat
from headrace.config import FrontendConfig
from headrace.frontend.main import Frontend
from headrace.links import Links
from headrace.process import Context

DEADLINE_S = 20


async def test_a_beat_that_fails_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(self: Links) -> None:
        raise LookupError("not foreseen")

    monkeypatch.setattr(Links, "flush", fail)
    monkeypatch.setattr(Context, "ready", lambda self: None)  # it changes the whole process
    board = Board.create([Seat("frontend", 0), Seat("engine", 0), Seat("tokenizer", 0)])
    slot = board.slot("frontend")
    context = Context(slot.seat, board, slot, "error", os.getppid())
    listener = socket.create_server(("127.0.0.1", 0))
    config = FrontendConfig(
        run_dir=str(tmp_path),
        listen_fd=listener.detach(),
        num_tokenizers=0,
        max_body_bytes=1,
        max_num_requests=0,
        max_queued_tokens=0,
        drain_timeout=0,
        max_kept_bytes=0,
        api_key_digests=[],
        admin_key_digests=[],
        allowed_origins=(),
        ssl_certfile=None,
        ssl_keyfile=None,
    )
    frontend = Frontend(config, context)
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(frontend.serve(), DEADLINE_S)
    assert failed.group_contains(LookupError, match="not foreseen")
    assert slot[Field.HEARTBEAT_NS], "it had begun"
    for server in frontend._server.servers:
        server.close()
        await server.wait_closed()
    frontend._inbox.close()
    frontend._links.close()
    os.close(board.fd)
