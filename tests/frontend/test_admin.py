"""What operators may ask, and what others are told."""

import json
import os
from collections.abc import Sequence

import pytest

from headrace.board.admin_requests import RENEWABLE, STOP, WISHES, AdminRequests
from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField, EngineField, FrontendField
from headrace.board.replicas import ModelWishes
from headrace.config.api_keys import digest
from headrace.config.process_configs import ModelCapacity
from headrace.frontend.admin import (
    DRAIN,
    METHODS,
    PROCESSES,
    RESTART,
    Admin,
    AdminResponse,
    model_action,
)
from headrace.frontend.admission.api_key_auth import ApiKeyAuth
from headrace.frontend.http.rejections import Rejection

KEY = b"key"


class Rig:
    """The routes of a frontend, and what the supervisor hears of them."""

    def __init__(
        self, *keys: bytes, profiles: bool = True, models: Sequence[ModelCapacity] = ()
    ) -> None:
        seats = [Seat("frontend", 0), Seat("engine", 0), Seat("worker", 0)]
        self.board = Board.create(seats)
        self.slot = self.board.slot("frontend")
        self.admin_requests = AdminRequests(self.board, WISHES)
        key_auth = ApiKeyAuth(map(digest, keys))
        self._admin = Admin(key_auth, self.board, self.slot, os.getppid(), profiles, models=models)

    def ask(
        self, method: str, path: str, query: bytes = b"", key: bytes | None = KEY
    ) -> AdminResponse | Rejection:
        return self._admin.handle(method, path, query, key)


def capacity(name: str) -> ModelCapacity:
    return ModelCapacity(name=name, encoded_name=f'"{name}"', max_num_requests=1, replica_bytes=0)


@pytest.mark.parametrize(
    ("keys", "key", "status"),
    [((), KEY, 403), ((), None, 403), ((KEY,), b"x", 401), ((KEY,), None, 401)],
)
def test_admin_paths_need_the_key(keys: tuple[bytes, ...], key: bytes | None, status: int) -> None:
    rig = Rig(*keys)
    for path in (PROCESSES, RESTART, DRAIN, "/admin/x", "/reset_mm_cache"):
        assert rig.ask(METHODS.get(path, "GET"), path, key=key).status == status
    assert not rig.admin_requests.take()


@pytest.mark.parametrize(
    ("path", "query", "admin_requests"),
    [
        (RESTART, b"", RENEWABLE),
        (RESTART, b"role=tokenizer", ("tokenizer",)),
        (RESTART, b"role=detokenizer&role=frontend&role=frontend", ("detokenizer", "frontend")),
        (DRAIN, b"", (STOP,)),
        ("/start_profile", b"", ("start_profile",)),
        ("/stop_profile", b"", ("stop_profile",)),
        ("/reset_mm_cache", b"", ("reset_mm_cache",)),
        ("/reset_encoder_cache", b"", ("reset_encoder_cache",)),
    ],
)
def test_what_is_asked_for_is_noted(
    path: str, query: bytes, admin_requests: tuple[str, ...]
) -> None:
    rig = Rig(KEY)
    answer = rig.ask("POST", path, query)
    assert isinstance(answer, AdminResponse)
    kept = {"kept": ["engine 0"]} if "engine" in admin_requests else {}
    told = {"accepted": list(admin_requests), **kept}
    status = 200 if path.startswith("/reset") else 202
    assert (answer.status, json.loads(answer.body)) == (status, told)
    assert set(rig.admin_requests.take()) == set(admin_requests)


def test_an_engine_with_replicas_is_not_kept() -> None:
    board = Board.create([Seat("frontend", 0), Seat("engine", 0), Seat("engine", 1)])
    admin = Admin(ApiKeyAuth([digest(KEY)]), board, board.slot("frontend"), 1, profiles=False)
    answer = admin.handle("POST", RESTART, b"role=engine", KEY)
    assert isinstance(answer, AdminResponse)
    assert json.loads(answer.body) == {"accepted": ["engine"]}


@pytest.mark.parametrize(
    ("method", "path", "query", "status"),
    [
        ("POST", RESTART, b"role=worker", 400),
        ("POST", RESTART, b"role=", 400),
        ("POST", RESTART, b"rolle=tokenizer", 400),
        ("GET", RESTART, b"", 405),
        ("POST", PROCESSES, b"", 405),
        ("GET", "/start_profile", b"", 405),
        ("GET", "/reset_encoder_cache", b"", 405),
        ("POST", "/admin/reboot", b"", 404),
    ],
)
def test_what_cannot_be_asked_is_refused(method: str, path: str, query: bytes, status: int) -> None:
    rig = Rig(KEY)
    answer = rig.ask(method, path, query)
    assert isinstance(answer, Rejection)
    assert (answer.status, bool(answer.allow)) == (status, status == 405)
    assert not rig.admin_requests.take()


def test_a_server_without_a_place_for_profiles_says_so() -> None:
    rig = Rig(KEY, profiles=False)
    answer = rig.ask("POST", "/start_profile")
    assert isinstance(answer, Rejection)
    assert (answer.status, "--profile-dir" in answer.message) == (404, True)
    assert not rig.admin_requests.take()


def test_each_process_is_reported() -> None:
    rig = Rig(KEY)
    rig.slot.enter(State.STARTING)
    rig.slot.enter(State.READY)
    rig.board.slot("worker")[CommonField.PID] = 2**22 + 1  # above any process id
    answer = rig.ask("GET", PROCESSES)
    assert isinstance(answer, AdminResponse)
    supervisor, frontend, _, worker = json.loads(answer.body)["processes"]
    assert (supervisor["process"], supervisor["pid"]) == ("supervisor", os.getppid())
    assert frontend["resident_bytes"] > 1 << 20
    assert 0 <= frontend["heartbeat_age_s"] < 60
    facts = [frontend[name] for name in ("process", "pid", "role", "state", "starts")]
    assert facts == ["frontend 0", os.getpid(), "frontend", "ready", 1]
    assert (worker["state"], worker["resident_bytes"]) == ("absent", None)


def test_paths_of_models_have_their_names() -> None:
    assert model_action("/admin/models/a/load") == ("a", "load")
    assert model_action("/admin/models/org%2Fname/unload") == ("org/name", "unload")
    assert model_action("/admin/models/org/name/unload") == ("org/name", "unload")
    assert model_action("/admin/models/org/name/sleep") == ("org/name", "sleep")
    for path in ("/admin/models/load", "/admin/models//load", "/admin/models/a/drop", "/admin/x/a"):
        assert model_action(path) is None, path
    rig = Rig(KEY)
    assert rig.ask("GET", "/admin/models/a/load").status == 405
    assert rig.ask("POST", "/admin/models/a/load").status == 404, "there is no such model"
    assert rig.ask("POST", "/admin/models/a/load", key=None).status == 401


@pytest.mark.parametrize(
    ("query", "counts", "sleeps"),
    [(b"", {}, {0: 1}), (b"level=1", {}, {0: 1}), (b"level=2", {0: 0}, {}), (b"level=0", {}, {})],
)
def test_sleep_is_as_vllm_has_it(
    query: bytes, counts: dict[int, int], sleeps: dict[int, int]
) -> None:
    rig = Rig(KEY, models=[capacity("m")])
    rig.board.slot("engine").enter(State.READY)
    rig.board.slot("engine")[EngineField.CAN_SLEEP] = 1
    numbers, sleep = (
        ModelWishes(rig.board, field) for field in (FrontendField.REPLICAS, FrontendField.SLEEPS)
    )
    assert rig.ask("POST", "/sleep", query).status == (202 if counts or sleeps else 400)
    assert (numbers.take(), sleep.take()) == (counts, sleeps)
    assert rig.ask("POST", "/wake_up", b"tags=weights").status == 202
    assert (numbers.take(), sleep.take()) == ({0: 1}, {0: 0})
    answer = rig.ask("GET", "/is_sleeping")
    assert isinstance(answer, AdminResponse)
    assert (answer.status, json.loads(answer.body)) == (200, {"is_sleeping": False})


def test_sleep_takes_no_other_parameters() -> None:
    rig = Rig(KEY, models=[capacity("m")])
    assert rig.ask("POST", "/sleep", b"level=1&mode=keep").status == 400
    assert rig.ask("GET", "/sleep").status == 405
