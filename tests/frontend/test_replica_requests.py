"""What operators are told of replicas, and may ask for."""

import json

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import EngineField, FrontendField, Seating, WorkerField
from headrace.board.replicas import ModelWishes
from headrace.config.process_configs import ModelCapacity
from headrace.frontend.http.rejections import Rejection
from headrace.frontend.replica_requests import (
    AdminResponse,
    ModelAction,
    ReplicaRequests,
)


class Rig:
    """Two models: four seats with one engine, and two seats with both."""

    def __init__(self, num_bytes: int = 100) -> None:
        engines = [Seat("engine", index) for index in range(6)]
        board = Board.create([Seat("frontend", 0), *engines, Seat("worker", 0)])
        self.worker = board.slot("worker")
        for index, slot in enumerate(board.of("engine")):
            slot[EngineField.MODEL] = index // 4
            if 0 < index < 4:
                slot[EngineField.SEATING] = Seating.VACANT
                slot[EngineField.IS_SPARE] = 1
        self.engines = list(board.of("engine"))
        board.slot("engine", 4).enter(State.READY)
        models = [
            ModelCapacity(
                name=name,
                encoded_name=json.dumps(name, ensure_ascii=False),
                max_num_requests=1,
                replica_bytes=25,
                why_fixed=why_fixed,
            )
            for name, why_fixed in (("a", ""), ('b"\N{FOX FACE}', "it has images"))
        ]
        self.requests = ReplicaRequests(models, board, board.slot("frontend"), lambda: num_bytes)
        self._wishes = ModelWishes(board, FrontendField.REPLICAS)
        self.sleeps = ModelWishes(board, FrontendField.SLEEPS)

    def ask(self, *asked: tuple[str, str]) -> tuple[int, str]:
        """Return the status of a request, and the message or the code of its answer."""
        answer = self.requests.handle(asked)
        if isinstance(answer, Rejection):
            assert not self._wishes.take()
            return answer.status, answer.message
        return answer.status, str(json.loads(answer.body)["replicas"])

    @property
    def wished(self) -> dict[int, int]:
        return self._wishes.take()


def test_replicas_of_each_model_are_told() -> None:
    first, second = json.loads(Rig().requests.status())["models"]
    assert first == {"model": "a", "replicas": 1, "ready": 0, "leaving": 0, "max_replicas": 4}
    assert (second["model"], second["replicas"], second["ready"]) == ('b"\N{FOX FACE}', 2, 1)


def test_a_number_of_replicas_is_noted() -> None:
    rig = Rig()
    answer = rig.requests.handle([("model", "a"), ("replicas", "2")])
    assert isinstance(answer, AdminResponse)
    assert (answer.status, json.loads(answer.body)["replicas"]) == (202, 2)
    assert rig.wished == {0: 2}


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ([("model", "a"), ("replicas", "0")], 400, "replicas must be 1 to 4"),
        ([("model", "a"), ("replicas", "5")], 400, "replicas must be 1 to 4"),
        ([("model", "a"), ("replicas", "-1")], 400, "replicas must be 1 to 4"),
        ([("model", "a"), ("replicas", "\N{ARABIC-INDIC DIGIT TWO}")], 400, "must be 1 to 4"),
        ([("model", "c"), ("replicas", "1")], 404, "there is no such model"),
        ([("replicas", "1")], 400, "of several models, model=NAME"),
        ([("model", "a")], 400, "takes replicas=NUMBER"),
        ([("model", "a"), ("replicas", "1"), ("replicas", "2")], 400, "takes replicas=NUMBER"),
        ([("model", "a"), ("replicas", "1"), ("count", "2")], 400, "takes replicas=NUMBER"),
        ([("model", "a"), ("replicas", "3")], 409, "3 replicas may take 0.0 GiB with all else"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    query: list[tuple[str, str]], status: int, text: str
) -> None:
    found, message = Rig().ask(*query)
    assert found == status
    assert text in message


def test_fewer_replicas_need_no_memory() -> None:
    for count in ("1", "2"):
        assert Rig(num_bytes=0).ask(("model", 'b"\N{FOX FACE}'), ("replicas", count)) == (
            202,
            count,
        )


def test_a_model_that_does_not_grow_says_why() -> None:
    asked = ("model", 'b"\N{FOX FACE}'), ("replicas", "3")
    assert Rig().ask(*asked) == (400, "replicas must be 1 to 2; it has images")
    rig = Rig()
    for slot in rig.engines[4:]:
        slot[EngineField.IS_REMOTE] = 1
    assert rig.ask(*asked) == (400, "it has images"), "there is no number that may be"


def test_a_model_whose_engines_are_all_elsewhere_says_so() -> None:
    rig = Rig()
    for slot in rig.engines[:4]:
        slot[EngineField.IS_REMOTE] = 1
    status, text = rig.ask(("model", "a"), ("replicas", "1"))
    assert (status, text.partition(",")[0]) == (400, "all engines are of --remote-engines")


def test_adapters_count_as_workers_reckon_them() -> None:
    rig = Rig()
    asked = ("model", "a"), ("replicas", "2")
    rig.worker[WorkerField.ADAPTER_BYTES] = 1
    assert rig.ask(*asked)[0] == 409
    rig.worker[WorkerField.ENGINE] = 4
    assert rig.ask(*asked)[0] == 409, "those of another model take memory, too"
    rig.worker[WorkerField.ADAPTER_BYTES] = 0
    assert rig.ask(*asked)[0] == 202


def test_engines_that_leave_have_their_memory_yet() -> None:
    rig = Rig()
    asked = ("model", "a"), ("replicas", "2")
    rig.engines[1][EngineField.SEATING] = rig.engines[5][EngineField.SEATING] = Seating.LEAVING
    assert rig.ask(*asked)[0] == 202, "it may stay"
    assert rig.wished
    rig.engines[2][EngineField.SEATING] = Seating.LEAVING
    assert rig.ask(*asked)[0] == 409


def test_models_are_loaded_and_unloaded_by_name() -> None:
    rig = Rig()
    name = 'b"\N{FOX FACE}'
    answer = rig.requests.apply(name, ModelAction.UNLOAD)
    assert isinstance(answer, AdminResponse)
    assert (answer.status, json.loads(answer.body)["replicas"]) == (202, 0)
    assert rig._wishes.take() == {1: 0}
    for slot in rig.engines[4:]:
        slot[EngineField.SEATING] = Seating.VACANT
    rig.engines[4][EngineField.LOAD_SIZE] = 2
    loaded = rig.requests.apply(name, ModelAction.LOAD)
    assert isinstance(loaded, AdminResponse)
    assert json.loads(loaded.body)["replicas"] == 2
    assert rig._wishes.take() == {1: 2}, "as many as it had"
    missing = rig.requests.apply("other", ModelAction.LOAD)
    assert isinstance(missing, Rejection)
    assert missing.status == 404


def test_engines_elsewhere_are_neither_counted_nor_unloaded() -> None:
    rig = Rig()
    rig.engines[5][EngineField.IS_REMOTE] = 1
    second = json.loads(rig.requests.status())["models"][1]
    assert (second["replicas"], second["max_replicas"]) == (1, 1)
    rig.engines[5][EngineField.IS_PLACED] = 1
    second = json.loads(rig.requests.status())["models"][1]
    assert (second["replicas"], second["max_replicas"]) == (2, 2), "those of Ray are the server's"
    rig.engines[5][EngineField.IS_PLACED] = 0
    refused = rig.requests.apply('b"\N{FOX FACE}', ModelAction.UNLOAD)
    assert isinstance(refused, Rejection)
    assert (refused.status, refused.code) == (409, "model_cannot_unload")
    rig.engines[4][EngineField.IS_REMOTE] = 1
    rig.requests.apply('b"\N{FOX FACE}', ModelAction.LOAD)
    assert not rig.wished, "which is no request for none"


def test_loading_a_model_changes_no_number_of_replicas() -> None:
    rig = Rig()
    rig.requests.apply("a", ModelAction.LOAD)
    assert rig._wishes.take() == {0: 1}


def test_a_model_that_is_loaded_is_put_to_sleep() -> None:
    rig = Rig()
    name = 'b"\N{FOX FACE}'
    rig.engines[4][EngineField.CAN_SLEEP] = 1
    answer = rig.requests.apply(name, ModelAction.SLEEP)
    assert isinstance(answer, AdminResponse)
    assert (answer.status, json.loads(answer.body)["replicas"]) == (202, 2)
    assert (rig._wishes.take(), rig.sleeps.take()) == ({}, {1: 1})
    rig.requests.apply(name, ModelAction.LOAD)
    assert (rig._wishes.take(), rig.sleeps.take()) == ({1: 2}, {1: 0})


@pytest.mark.parametrize(
    ("name", "code"), [("a", "model_not_loaded"), ('b"\N{FOX FACE}', "model_cannot_sleep")]
)
def test_a_model_that_cannot_sleep_says_why(name: str, code: str) -> None:
    rig = Rig()
    answer = rig.requests.apply(name, ModelAction.SLEEP)
    assert isinstance(answer, Rejection)
    assert (answer.status, answer.code) == (409, code)
    assert not rig.sleeps.take()


def test_several_models_have_no_sleep_of_all() -> None:
    answer = Rig().requests.apply_alone(ModelAction.SLEEP)
    assert isinstance(answer, Rejection)
    assert answer.status == 400
    assert "/admin/models/NAME/sleep" in answer.message


def test_models_sleep_when_none_is_awake() -> None:
    rig = Rig()
    assert rig.requests.sleep_status() == b'{"is_sleeping":false}'
    for slot in rig.engines[:4]:
        slot[EngineField.SEATING] = Seating.VACANT
    for slot in rig.engines[4:]:
        slot.enter(State.READY)
        assert rig.requests.sleep_status() == b'{"is_sleeping":false}'
        slot[EngineField.IS_ASLEEP] = 1
    assert rig.requests.sleep_status() == b'{"is_sleeping":true}'
