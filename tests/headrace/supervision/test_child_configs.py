"""The configs of processes, by their seats."""

from pathlib import Path
from typing import Any

import pytest
from tiny_card import TINY_CARD

from headrace.board.board import Board
from headrace.config.config import ServerConfig
from headrace.supervision import engine_groups
from headrace.supervision.child_configs import ChildConfigs
from headrace.supervision.engine_groups import EngineGroup, write_places
from headrace.supervision.seats import seats_of


def test_weights_are_digested_once_for_all_remote_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digested: list[Path] = []
    monkeypatch.setattr(engine_groups, "sampled_digest", lambda path: digested.append(path) or "")
    config = ServerConfig(remote_engines=("tcp://a:1", "tcp://b:2"), engine_key_file="key")
    board = Board.create(seats_of(config))
    write_places(board, [config])
    rest: Any = dict.fromkeys(("arena", "fetched", "engine_seats", "crash", "files", "listen_fds"))
    configs = ChildConfigs(
        groups=[EngineGroup(config, TINY_CARD)],
        run_dir="",
        started_at=0,
        api_keys=(),
        admin_keys=(),
        demand_fd=-1,
        board=board,
        **rest,
    )
    assert not digested
    found = [configs._remote_engine(index) for index in (0, 1, 2, 1, 2)]
    assert [each and each.address for each in found[:3]] == [None, "tcp://a:1", "tcp://b:2"]
    assert len(digested) == 1, "an engine that is started anew has the terms of the first"
