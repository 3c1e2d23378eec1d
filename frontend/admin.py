"""`/admin`: status and actions for operators, with a key of their own.

Answers come from the board and the kernel. Requests are noted on the board, for the supervisor and
the workers (`admin_requests.py`, `replicas.py`). Names have no characters that JSON would escape;
those of models come encoded.
"""

import time
from collections import Counter
from collections.abc import Sequence
from urllib.parse import parse_qsl, unquote

from headrace.board.admin_requests import (
    RENEWABLE,
    RESETS,
    START_PROFILE,
    STOP,
    STOP_PROFILE,
    admin_request,
)
from headrace.board.board import Board, Seat, Slot, State
from headrace.board.fields import CommonField, EngineField, FrontendField, Seating
from headrace.config.process_configs import ModelCapacity
from headrace.frontend.admission.api_key_auth import ApiKeyAuth
from headrace.frontend.http.rejections import Rejection
from headrace.frontend.replica_requests import (
    AdminResponse,
    ModelAction,
    ReplicaRequests,
    invalid,
)
from headrace.routes import KV_WARM, RESET_ENCODER_CACHE, RESET_MM_CACHE, ROUTES, Need
from headrace.system.machine import memory_limit
from headrace.system.procfs import vitals_of

PREFIX = "/admin/"
PROCESSES, RESTART, DRAIN = "/admin/processes", "/admin/restart", "/admin/drain"
REPLICAS, MODELS = "/admin/replicas", "/admin/models/NAME/load, /unload or /sleep"
MODELS_PREFIX = "/admin/models/"
PROFILES = {"/start_profile": START_PROFILE, "/stop_profile": STOP_PROFILE}  # vLLM's and SGLang's
CACHES = dict(zip((RESET_MM_CACHE, RESET_ENCODER_CACHE), RESETS, strict=True))  # vLLM's
SLEEP_PATH, WAKE_UP, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"  # vLLM's
SLEEP_LEVELS = {"1": ModelAction.SLEEP, "2": ModelAction.UNLOAD}
READS, ACTS = ("GET", "HEAD"), ("POST",)
METHODS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((SLEEP_PATH, WAKE_UP), ACTS),
    IS_SLEEPING: READS,
    PROCESSES: READS,
    REPLICAS: (*READS, *ACTS),
    RESTART: ACTS,
    DRAIN: ACTS,
    **dict.fromkeys((*PROFILES, *CACHES), ACTS),
}

NO_PROFILES = Rejection(
    404,
    "this server keeps no profiles; start it with --profile-dir",
    "invalid_request_error",
    "no_profile_dir",
)
CLOSED = Rejection(
    403,
    "this server has no key for /admin; start it with --admin-api-key",
    "permission_error",
    "no_admin_key",
)
NO_UPDATES = Rejection(
    403,
    "adapters cannot be loaded by clients; start with --allow-runtime-lora-updating or an "
    "--admin-api-key",
    "permission_error",
    "no_admin_key",
)
NO_WARMING = Rejection(
    403,
    f"{KV_WARM} needs a key; start with --admin-api-key",
    "permission_error",
    "no_admin_key",
)
WRONG_KEY = Rejection(
    401,
    "/admin needs the key of --admin-api-key: send the header Authorization: Bearer KEY",
    "authentication_error",
    "invalid_api_key",
)


# Paths that need the key, too, and are answered by the ring.
ADAPTERS = frozenset(
    path for route in ROUTES if route.need is Need.ADAPTERS for path in route.paths
)


def is_for_operators(path: str) -> bool:
    """Whether a path belongs to `Admin`."""
    return path.startswith(PREFIX) or path in METHODS


class Admin:
    """The endpoints below `PREFIX`, and those in `METHODS`. Without a key they are closed.

    Args:
        supervisor: its process id.
        profiles: whether workers keep some.
        opens_adapters: whether clients without the key load adapters.
        models: of the server.
    """

    def __init__(
        self,
        key_auth: ApiKeyAuth,
        board: Board,
        slot: Slot,
        supervisor: int,
        profiles: bool,
        opens_adapters: bool = False,
        models: Sequence[ModelCapacity] = (),
    ) -> None:
        self.opens_adapters = opens_adapters
        self._replicas = ReplicaRequests(models, board, slot, memory_limit)
        self._profiles = profiles
        self._key_auth = key_auth
        self._board = board
        self._slot = slot
        self._supervisor = supervisor

    def guards(self, path: str) -> bool:
        """Whether a path that tokenizers answer takes this key alone."""
        return path == KV_WARM or (path in ADAPTERS and not self.opens_adapters)

    def refuse(self, path: str, key: bytes | None) -> Rejection | None:
        """Return why a client cannot send to a guarded path, or None."""
        if not self._key_auth:
            return NO_UPDATES if path in ADAPTERS else NO_WARMING
        if self._key_auth.admits(key):
            return None
        self._slot.add(FrontendField.UNAUTHORIZED)
        return WRONG_KEY

    def handle(
        self, method: str, path: str, query: bytes, key: bytes | None
    ) -> AdminResponse | Rejection:
        """Execute an admin request, or return the reason why not."""
        if not self._key_auth:
            return CLOSED
        if not self._key_auth.admits(key):
            self._slot.add(FrontendField.UNAUTHORIZED)
            return WRONG_KEY
        named = model_action(path)
        taken = METHODS.get(path) if named is None else ACTS
        if taken is None:
            there = ", ".join((*METHODS, MODELS))
            return invalid(404, f"there is nothing here; there are {there}")
        if method not in taken:
            told = " and ".join(one for one in taken if one != "HEAD")
            return invalid(405, f"{path} takes {told}", ", ".join(taken))
        if named is not None:
            return self._replicas.apply(*named)
        return self._execute(method, path, query)

    def _execute(self, method: str, path: str, query: bytes) -> AdminResponse | Rejection:
        if path == PROCESSES:
            return AdminResponse(200, self._processes())
        asked = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        if path == REPLICAS:
            if method in READS:
                return AdminResponse(200, self._replicas.status())
            return self._replicas.handle(asked)
        if path in (SLEEP_PATH, WAKE_UP, IS_SLEEPING):
            return self._sleep(path, asked)
        if path == DRAIN:
            return self._admin_request(STOP)
        if path in CACHES:
            return self._admin_request(CACHES[path], status=200)  # requests after it miss
        if path in PROFILES:
            return self._admin_request(PROFILES[path]) if self._profiles else NO_PROFILES
        if any(name != "role" or value not in RENEWABLE for name, value in asked):
            return invalid(
                400, f"{path} takes role=NAME, one of {', '.join(RENEWABLE)}, or nothing"
            )
        return self._admin_request(*(dict.fromkeys(role for _, role in asked) or RENEWABLE))

    def _sleep(self, path: str, asked: Sequence[tuple[str, str]]) -> AdminResponse | Rejection:
        """Answer as vLLM does, where the model is one: have it sleep or wake, or tell."""
        if path == IS_SLEEPING:
            return AdminResponse(200, self._replicas.sleep_status())
        if path == WAKE_UP:
            return self._replicas.apply_alone(ModelAction.LOAD)
        level = dict(asked).get("level", "1")
        if level not in SLEEP_LEVELS or any(name != "level" for name, _ in asked):
            return invalid(400, f"{SLEEP_PATH} takes level=1, which keeps weights, or level=2")
        return self._replicas.apply_alone(SLEEP_LEVELS[level])

    def _admin_request(self, *admin_requests: str, status: int = 202) -> AdminResponse:
        for what in admin_requests:
            admin_request(self._slot, what)
        entries = ",".join(f'"{what}"' for what in admin_requests)
        kept = ",".join(f'"{seat}"' for seat in self._kept) if "engine" in admin_requests else ""
        told = f',"kept":[{kept}]' if kept else ""
        return AdminResponse(status, f'{{"accepted":[{entries}]{told}}}'.encode("ascii"))

    @property
    def _kept(self) -> list[Seat]:
        """The engines that no restart replaces: their models have no others."""
        seated = [
            slot for slot in self._board.of("engine") if slot[EngineField.SEATING] == Seating.SEATED
        ]
        counts = Counter(slot[EngineField.MODEL] for slot in seated)
        return [slot.seat for slot in seated if counts[slot[EngineField.MODEL]] == 1]

    def _processes(self) -> bytes:
        now_ns = time.monotonic_ns()
        entries = [
            f'{{"process":"supervisor","pid":{self._supervisor},{memory(self._supervisor)}}}'
        ]
        entries += [process_of(slot, now_ns) for slot in self._board.occupied()]
        return f'{{"processes":[{",".join(entries)}]}}'.encode("ascii")


def process_of(slot: Slot, now_ns: int) -> str:
    """Return a process's status as JSON."""
    state = State(slot[CommonField.STATE]).name.lower()
    return (
        f'{{"process":"{slot.seat}","pid":{slot[CommonField.PID]},"role":"{slot.seat.role}",'
        f'"state":"{state}","starts":{slot[CommonField.STARTS]},'
        f'"heartbeat_age_s":{slot.silent_s(now_ns):.2f},{memory(slot[CommonField.PID])}}}'
    )


def model_action(path: str) -> tuple[str, ModelAction] | None:
    """Return what is asked of which model by a path, or None of another path."""
    before, _, what = path.removeprefix(MODELS_PREFIX).rpartition("/")
    is_one = path.startswith(MODELS_PREFIX) and before and what in list(ModelAction)
    return (unquote(before), ModelAction(what)) if is_one else None


def memory(pid: int) -> str:
    """Return a process's kernel statistics as JSON; null if it is gone."""
    vitals = vitals_of(pid) if pid else None
    if vitals is None:
        return '"resident_bytes":null,"cpu_s":null'
    return f'"resident_bytes":{vitals.resident_bytes},"cpu_s":{vitals.cpu_s:.2f}'
