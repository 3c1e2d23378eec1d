"""A frontend keeps idle connections, answers waiting requests, and ends when its heart fails."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import headrace.frontend.main as module
from headrace.board.board import Board, Seat
from headrace.board.fields import CommonField, FrontendField
from headrace.config.process_configs import FrontendConfig
from headrace.frontend.main import Frontend
from headrace.ipc.router import Router
from headrace.runtime.process import Context

DEADLINE_S = 120
PROXY_S = 60  # for which nginx and load balancers keep idle connections


@pytest.fixture
def board() -> Board:
    return Board.create([Seat("frontend", 0), Seat("engine", 0), Seat("tokenizer", 0)])


@pytest.fixture
async def frontend(board: Board, tmp_path: Path) -> AsyncIterator[Frontend]:
    slot = board.slot("frontend")
    context = Context(slot.seat, board, slot, "error", os.getppid())
    listener = socket.create_server(("127.0.0.1", 0))
    config = FrontendConfig(
        run_dir=str(tmp_path),
        listen_fd=listener.detach(),
        num_tokenizers=0,
        max_body_bytes=1,
        models=(),
        max_queued_tokens=0,
        drain_timeout=0,
        max_kept_bytes=0,
        api_key_digests=[],
        admin_key_digests=[],
        allowed_origins=(),
        ssl_certfile=None,
        ssl_keyfile=None,
    )
    made = Frontend(config, context)
    yield made
    for server in getattr(made._server, "servers", ()):
        server.close()
        await server.wait_closed()
    made._inbox.close()
    made._links.close()


async def test_a_beat_that_fails_ends_the_server(
    frontend: Frontend, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Router) -> None:
        raise LookupError("not foreseen")

    monkeypatch.setattr(Router, "flush", fail)
    monkeypatch.setattr(Context, "ready", lambda self: None)  # it changes the whole process
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(frontend.serve(), DEADLINE_S)
    assert failed.group_contains(LookupError, match="not foreseen")
    assert board.slot("frontend")[CommonField.HEARTBEAT_NS], "it had begun"


async def test_connected_client_may_ask_a_leaving_frontend(
    frontend: Frontend, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0)
    monkeypatch.setattr(Context, "ready", lambda self: None)
    slot = board.slot("frontend")
    with socket.socket(fileno=os.dup(frontend._config.listen_fd)) as listener:
        host, port = listener.getsockname()
    serving = asyncio.create_task(frontend.serve())
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(host, port)
        while not slot[FrontendField.CONNECTIONS]:
            await asyncio.sleep(0)
        frontend._leave()
        for _ in range(5):
            beat = slot[CommonField.HEARTBEAT_NS]
            while slot[CommonField.HEARTBEAT_NS] == beat:
                await asyncio.sleep(0)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 503 "), "and then it is closed"
        writer.close()
        await serving


async def test_an_idle_connection_is_the_clients_to_close(frontend: Frontend) -> None:
    assert frontend._server.config.timeout_keep_alive > PROXY_S
    os.close(frontend._config.listen_fd)  # it has not served
