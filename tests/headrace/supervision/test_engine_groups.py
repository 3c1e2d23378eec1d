"""Which engines and workers belong to which model."""

import re
from dataclasses import replace
from typing import Any

import pytest
from tiny_card import TINY_CARD

from headrace.board.board import Board
from headrace.board.fields import MAX_REPLICAS, EngineField
from headrace.board.model_status import ModelState
from headrace.board.replicas import own_engines
from headrace.config.config import ServerConfig
from headrace.errors import ConfigError
from headrace.supervision import engine_groups
from headrace.supervision.engine_groups import (
    EngineGroup,
    EnginePlace,
    check_groups,
    load_policy,
    num_seats,
    places_of,
    reserved_bytes,
    write_places,
)
from headrace.supervision.load_policy import LoadDecision, ModelDemand
from headrace.supervision.seats import seats_of

CONFIGS = [ServerConfig(tp=2), ServerConfig(data_parallel_size=2), ServerConfig()]


def group(name: str, images: bool = False, nbytes: int = 0, **flags: Any) -> EngineGroup:
    card = replace(
        TINY_CARD, path=name, name=name, image_token=1 if images else None, weight_bytes=nbytes
    )
    return EngineGroup(ServerConfig(**flags), card)


def test_engines_of_a_model_are_adjacent_as_are_their_workers() -> None:
    workers = (range(2), range(2, 3), range(3, 4), range(4, 5), range(5, 7), range(7, 9))
    models, replicas = (0, 1, 1, 2, 0, 0), (0, 0, 1, 0, 1, 2)
    places = [
        EnginePlace(*place, is_spare=index > 3)
        for index, place in enumerate(zip(models, replicas, workers, strict=True))
    ]
    assert places_of(CONFIGS) == places[:4]
    further = places_of(CONFIGS, may_grow=True)
    assert further[: len(places)] == places
    assert num_seats(CONFIGS, may_grow=True) == [5, 6, 5]
    assert len(further) == MAX_REPLICAS


def test_remote_engines_come_last_and_have_no_workers() -> None:
    config = ServerConfig(remote_engines=("tcp://a:1", "tcp://b:2"), engine_key_file="key")
    board = Board.create(seats_of(config, may_grow=True))
    write_places(board, [config], may_grow=True)
    places = places_of([config], may_grow=True)
    assert len(places) == MAX_REPLICAS
    assert [place.is_remote for place in places[-3:]] == [False, True, True]
    assert [slot.seat.index for slot in board.of("engine") if board.is_remote(slot)] == [14, 15]
    assert len(list(board.of("worker"))) == MAX_REPLICAS - 2
    assert len(board.occupied("engine")) == 3


def test_further_seats_are_vacant() -> None:
    configs = [ServerConfig(tp=2), ServerConfig(data_parallel_size=2)]
    board = Board.create(seats_of(*configs, may_grow=True))
    write_places(board, configs, may_grow=True)
    assert [str(slot.seat) for slot in board.occupied("worker")] == [
        f"worker {index}" for index in range(4)
    ]
    assert len(board.occupied("engine")) == 3


def test_models_that_take_images_have_no_further_seats() -> None:
    seats = seats_of(ServerConfig(), takes_images=True, may_grow=True)
    assert sum(seat.role == "engine" for seat in seats) == 1


def test_board_tells_which_processes_belong_together() -> None:
    board = Board.create(seats_of(*CONFIGS))
    write_places(board, CONFIGS)
    assert [slot[EngineField.MODEL] for slot in board.of("engine")] == [0, 1, 1, 2]
    engines = [board.engine_of(slot) for slot in board.of("worker")]
    assert [one and one.seat.index for one in engines] == [0, 0, 1, 2, 3]
    assert board.engine_of(board.slot("tokenizer")) is None
    replicas = [[one.seat.index for one in board.replicas_of(e)] for e in board.of("engine")]
    assert replicas == [[0], [1, 2], [1, 2], [3]]


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([group("a"), group("a")], "two models are called a; give one a served_model_name below"),
        ([group("a"), group("b", images=True)], "b takes images, which go with one model alone"),
        ([group("a", images=True, data_parallel_size=2)], "--data-parallel-size 2 is for models"),
        ([group("a", data_parallel_size=9), group("b", data_parallel_size=8)], "have 17 engines"),
    ],
)
def test_models_that_do_not_go_together_are_refused(groups: list[EngineGroup], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_groups(groups)


def test_memory_of_other_models_is_reserved() -> None:
    first = group("a", nbytes=100, data_parallel_size=2, kv_cache_memory_bytes=7)
    second = group("b", nbytes=100, quantization="int8")
    assert [reserved_bytes([first, second], own) for own in (0, 1)] == [25, 164]
    on_gpus = group("c", nbytes=100, device="cuda")
    assert reserved_bytes([first, on_gpus], 0) == 0, "it is not in the CPU's memory"


@pytest.mark.parametrize("has_gpus", [False, True])
def test_engines_that_ray_places_grow(monkeypatch: pytest.MonkeyPatch, has_gpus: bool) -> None:
    monkeypatch.setattr(engine_groups, "has_gpus", lambda: has_gpus)
    flags: dict[str, Any] = {
        "data_parallel_backend": "ray",
        "data_parallel_size": 3,
        "data_parallel_size_local": 1,
        "remote_engines": ("tcp://a:1",),
        "engine_key_file": "key",
    }
    config = ServerConfig(**flags)
    board = Board.create(seats_of(config, may_grow=True))
    write_places(board, [config], may_grow=True)
    engines = list(board.of("engine"))
    assert len(engines) == MAX_REPLICAS
    assert [slot[EngineField.IS_REMOTE] for slot in engines] == [0] + [1] * (MAX_REPLICAS - 1)
    assert [slot[EngineField.IS_PLACED] for slot in engines] == [0, 0] + [1] * (MAX_REPLICAS - 2)
    assert [slot.seat.index for slot in board.occupied("engine")] == [0, 1, 2, 3]
    assert len(own_engines(board, 0)) == MAX_REPLICAS - 1, "all but the one at an address"
    assert len(places_of([config])) == 4, "nothing grows without an operator's key"
    grown = group("a", nbytes=100, **flags)
    assert (grown.why_fixed, grown.capacity.replica_bytes, grown.growth_share(1)) == ("", 0, 0)


@pytest.mark.parametrize(
    ("flags", "images", "why"),
    [
        ({"device": "cpu"}, False, ""),
        ({"device": "cuda"}, False, "engines on GPUs share the first ones, .* set of GPUs$"),
        ({"device": "cpu"}, True, "a model that takes images has one engine; give --max-images 0"),
        (
            {"device": "cpu", "kv_events_config": '{"enable_kv_cache_events": true}'},
            False,
            "with --kv-events-config there are no more .* or without events$",
        ),
        ({"pp": 2, "distributed_executor_backend": "ray"}, False, "stages on several machines"),
    ],
)
def test_a_model_that_gets_no_more_engines_has_a_reason(
    flags: dict[str, Any], images: bool, why: str
) -> None:
    found = group("a", images, **flags).why_fixed
    assert re.match(why, found) and bool(found) == bool(why)


def test_a_replica_takes_what_its_flags_say() -> None:
    one = group("a", nbytes=100, device="cpu", kv_cache_memory_bytes=7, kv_store_bytes=5)
    assert one.replica_bytes == 75 + 7 + 5
    drafted = EngineGroup(one.config, replace(one.card, draft_bytes=30))
    assert drafted.replica_bytes == 75 + 7 + 5 + 30


def test_stages_have_a_tied_embedding_twice() -> None:
    one, staged = (group("a", nbytes=100, device="cpu", pp=pp) for pp in (1, 2))
    card = replace(one.card, tied_bytes=20)
    assert EngineGroup(one.config, card).least_weight_bytes == 75
    assert EngineGroup(staged.config, card).least_weight_bytes == 90


def test_models_on_gpus_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_groups, "has_gpus", lambda: True)
    configs = [ServerConfig(), ServerConfig(device="cpu")]
    assert num_seats(configs, may_grow=True) == [1, 15]
    assert num_seats([ServerConfig(device="cuda")], may_grow=True) == [1]
    assert num_seats([ServerConfig(engine="mock")], may_grow=True) == [MAX_REPLICAS]
    assert group("a", nbytes=100).replica_bytes == 0


def test_memory_is_reserved_for_models_that_are_loaded_together() -> None:
    sizes = {"a": 4, "b": 36, "c": 20}
    groups = [group(name, nbytes=size, max_loaded_models=2) for name, size in sizes.items()]
    assert [reserved_bytes(groups, own) for own in range(3)] == [27, 15, 27]
    groups = [group(name, nbytes=4, max_loaded_models=0) for name in "ab"]
    assert reserved_bytes(groups, 0) == 0, "the largest ones that fit are loaded"


def test_models_are_loaded_by_number_or_as_memory_is_enough() -> None:
    flags = {"device": "cpu", "kv_cache_memory_bytes": 10}

    def num_first(most: int | None) -> int:
        groups = [group(name, nbytes=40, max_loaded_models=most, **flags) for name in "abc"]
        return load_policy(groups, memory_bytes=85).num_first

    assert [num_first(most) for most in (None, 1, 2, 9, 0)] == [3, 1, 2, 3, 2]
    shares = [group("a", device="cuda", gpu_memory_utilization=0.4, max_loaded_models=0)] * 3
    assert load_policy(shares, memory_bytes=1).num_first == 2


def test_a_model_loads_into_no_memory_that_replicas_have() -> None:
    flags = {"device": "cpu", "kv_cache_memory_bytes": 10}
    loaded = ModelDemand(ModelState.LOADED, 0, is_busy=False)
    asked = ModelDemand(ModelState.UNLOADED, 1, is_busy=False)
    for most in (None, 0):
        groups = [group(name, nbytes=40, max_loaded_models=most, **flags) for name in "ab"]
        policy = load_policy(groups, memory_bytes=85)
        assert policy.decide([asked, loaded], 0) == LoadDecision([0], [])
        policy.resize(1, 1)
        assert policy.decide([asked, loaded], 0) == LoadDecision([], [1])


def test_seats_of_models_that_are_not_loaded_are_vacant() -> None:
    board = Board.create(seats_of(*CONFIGS))
    write_places(board, CONFIGS, num_first=2)
    assert [slot.seat.index for slot in board.occupied("engine")] == [0, 1, 2]
    assert [slot.seat.index for slot in board.occupied("worker")] == [0, 1, 2, 3]
