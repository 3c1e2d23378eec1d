"""Memory that outlives engines."""

from typing import Any

import pytest

from headrace.board.board import Board
from headrace.config.config import ServerConfig
from headrace.supervision.engine_files import EngineFiles
from headrace.supervision.engine_groups import write_places
from headrace.supervision.seats import seats_of

HERE = {"data_parallel_size": 2}
ELSEWHERE = {"remote_engines": ("tcp://a:1",), "engine_key_file": "key"}
LISTENS = {"engine_listen": "tcp://a:1", "engine_key_file": "key"}
STORE = {"kv_store_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("flags", "num_indexes"),
    [
        ({}, []),
        (HERE, [1, 1]),
        (HERE | STORE, [2, 2]),
        (ELSEWHERE, [1, 2]),  # that machine may have a store
        (LISTENS, [1]),
        (LISTENS | STORE, [2]),
    ],
)
def test_engines_with_replicas_have_an_index_and_their_store_one(
    flags: dict[str, Any], num_indexes: list[int]
) -> None:
    config = ServerConfig(**flags)
    board = Board.create(seats_of(config))
    write_places(board, [config])
    files = EngineFiles(board, [config], takes_images=False)
    assert [len(fds) for fds in files.prefix_fds.values()] == num_indexes
    for tiers, fds in zip(files.store_tiers, files.prefix_fds.values(), strict=False):
        assert tiers.index_fd == fds[1], "the store writes what tokenizers read"
