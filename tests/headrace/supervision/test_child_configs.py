"""The configs of processes, by their seats."""

from pathlib import Path
from typing import Any

import pytest
from tiny_card import TINY_CARD

from headrace.board.board import Board, Seat
from headrace.config.config import ServerConfig
from headrace.ipc.curve_key import read_key
from headrace.supervision import engine_groups
from headrace.supervision.child_configs import ChildConfigs
from headrace.supervision.engine_groups import EngineGroup, write_places
from headrace.supervision.seats import seats_of


def configs_of(config: ServerConfig, run_dir: str) -> ChildConfigs:
    """Return the configs of a server's processes."""
    board = Board.create(seats_of(config))
    write_places(board, [config])
    rest: Any = dict.fromkeys(("arena", "fetched", "engine_seats", "crash", "files", "listen_fds"))
    return ChildConfigs(
        groups=[EngineGroup(config, TINY_CARD)],
        run_dir=run_dir,
        started_at=0,
        api_keys=(),
        admin_keys=(),
        demand_fd=-1,
        board=board,
        **rest,
    )


def test_weights_are_digested_once_for_all_remote_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digested: list[Path] = []
    monkeypatch.setattr(engine_groups, "sampled_digest", lambda path: digested.append(path) or "")
    configs = configs_of(
        ServerConfig(remote_engines=("tcp://a:1", "tcp://b:2"), engine_key_file="key"), ""
    )
    assert not digested
    found = [configs._remote_engine(index) for index in (0, 1, 2, 1, 2)]
    assert [each and each.address for each in found[:3]] == [None, "tcp://a:1", "tcp://b:2"]
    assert len(digested) == 1, "an engine that is started anew has the terms of the first"


def test_placed_engines_come_last_and_share_a_key_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_groups, "sampled_digest", lambda _path: "")
    config = ServerConfig(
        engine="mock",
        tp=2,
        data_parallel_backend="ray",
        address="head:6379",
        data_parallel_size=3,
        data_parallel_size_local=1,
        remote_engines=("tcp://a:1",),
        engine_key_file="key",
    )
    configs = configs_of(config, str(tmp_path))
    placement = configs.of(Seat("placement", 0))
    seats = {"engine 2": ("engine", 2), "engine 3": ("engine", 3)}
    assert (placement.seats, placement.num_cpus, placement.num_gpus) == (seats, 3, 0)
    assert placement.address == "head:6379"
    found = [configs._remote_engine(index) for index in range(4)]
    assert [each and (each.address, each.key_file) for each in found] == [
        None,
        ("tcp://a:1", "key"),
        *[(None, placement.key_file)] * 2,
    ]
    key = read_key(placement.key_file)
    configs.of(Seat("placement", 0))
    assert read_key(placement.key_file) == key, "its successor has the same key"


def test_stages_of_other_machines_have_the_seats_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_groups, "sampled_digest", lambda _path: "digest")
    config = ServerConfig(pp=3, distributed_executor_backend="ray", address="head:6379")
    configs = configs_of(config, str(tmp_path))
    placement = configs.of(Seat("placement", 0))
    assert placement.address == "head:6379"
    seats = {"stage 1": ("worker", 1), "stage 2": ("worker", 2)}
    assert (placement.seats, placement.num_cpus, placement.are_stages) == (seats, 2, True)
    stages = configs._remote_stages
    assert stages is not None
    assert (stages.run_dir, stages.key_file) == (str(tmp_path), placement.key_file)
    assert stages.terms["digest of weights"] == "digest"
    assert read_key(stages.key_file)
